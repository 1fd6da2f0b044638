"""Attention with other tiles than those that are chosen: which of them this GPU would rather have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from batchinfer_kernels.gpu import attention_launch
from batchinfer_kernels.gpu.attention_launch import KVTiles, Work
from tests.gpu_suite import attention
from tests.gpu_suite.case import Case, described, measured
from tests.gpu_suite.clock import Call
from tests.gpu_suite.paged import Heads
from tests.gpu_suite.section import Part, Section
from tests.gpu_suite.step import DTYPE

QWEN_HALF_B = Heads(14, 2, 64, 16)  # heads of 64, as small models have them
FEW = 3  # candidates with small heads
CHOSEN = "the chosen tiles"
_WIDE = ((64, 64, 4, 5), (128, 128, 8, 3), (128, 64, 8, 5), (128, 64, 8, 3), (64, 128, 4, 3), (128, 32, 8, 5))
_NARROW = ((16, 128, 8, 3), (16, 64, 4, 5), (16, 128, 4, 3), (16, 64, 2, 6), (16, 64, 8, 4), (16, 32, 4, 6))
# rows, keys, warps, stages; the most promising first
CANDIDATES: dict[Work, tuple[tuple[int, int, int, int], ...]] = {
    "prefill": _WIDE,
    "decode": _NARROW,
    "prefix": _WIDE,
}
TINY_CANDIDATES: dict[Work, tuple[tuple[int, int, int, int], ...]] = {
    "prefill": ((32, 32, 4, 1),),
    "decode": ((16, 32, 4, 1),),
    "prefix": ((32, 64, 4, 1),),
}
# Sizes as attention's cases have them
DECODE, PREFILL, PREFIX = (64, 4096), (1, 4096, 4096), (256, 8192, 128)


def run(section: Section) -> None:
    """A result for each kind of kernel, head size and candidate."""
    section.parts(rehearsed(section) if section.setting.rehearsal else cases(section))


def cases(section: Section) -> list[Part]:
    """First what large models have, then, with the most promising candidates, what small ones have."""
    found: list[Part] = []
    for heads, most in ((attention.LLAMA_8B, None), (QWEN_HALF_B, FEW)):
        makers = _makers(section, heads)
        for work, candidates in CANDIDATES.items():
            found += [
                _part(section, heads, work, KVTiles(*sizes), makers[work]) for sizes in candidates[:most]
            ]
    return found


def _makers(section: Section, heads: Heads) -> dict[Work, Callable[[], Case]]:
    count, length = DECODE
    return {
        "decode": partial(attention.decode_case, section, heads, [length] * count, None),
        "prefill": partial(attention.prefill_case, section, heads, *PREFILL),
        "prefix": partial(attention.prefix_case, section, heads, *PREFIX),
    }


def rehearsed(section: Section) -> list[Part]:
    """Each kind once, on a few keys."""
    tiny = attention.TINY
    makers: dict[Work, Callable[[], Case]] = {
        "decode": partial(attention.decode_case, section, tiny, [33, 17], None),
        "prefill": partial(attention.prefill_case, section, tiny, 1, 20, 40),
        "prefix": partial(attention.prefix_case, section, tiny, 4, 256, 3),
    }
    return [
        _part(section, tiny, work, KVTiles(*TINY_CANDIDATES[work][0]), make) for work, make in makers.items()
    ]


def _part(section: Section, heads: Heads, work: Work, tiles: KVTiles, make: Callable[[], Case]) -> Part:
    name = f"{work} at heads of {heads.dim} with {astuple(tiles)}"
    return name, partial(_measured, section, heads, work, tiles, make)


def _measured(
    section: Section, heads: Heads, work: Work, tiles: KVTiles, make: Callable[[], Case]
) -> dict[str, Any]:
    """Right and in time beside the chosen tiles; a candidate that the GPU has no room for is told as one."""
    usual = make()
    chosen = attention_launch.choose_tiles(work, DTYPE, heads.dim)
    with instead(work, tiles):
        case = make()
    tried = replace(
        case,
        size=f"{case.size}, heads of {heads.dim}",
        ours=_with(work, tiles, case.ours),
        error=lambda: _error(work, tiles, case),
        others={CHOSEN: usual.ours},
        target=None,
        aim={},
    )
    told = {"kind": "tiles", "tiles": list(astuple(tiles)), "chosen": list(astuple(chosen))}
    try:
        return {**measured(section, tried), **told, "fits": True}
    except OutOfResources:
        return {**described(tried), **told, "fits": False, "error": None, "ours": None, "others": {}}


def _error(work: Work, tiles: KVTiles, case: Case) -> Any:
    with instead(work, tiles):
        return case.error()


def _with(work: Work, tiles: KVTiles, call: Call) -> Call:
    def tiled() -> Any:
        with instead(work, tiles):
            return call()

    return tiled


@contextmanager
def instead(work: Work, tiles: KVTiles) -> Iterator[None]:
    """Plans and launches of this kind are cut so; what launches remember of the usual ones is forgotten."""
    usual = attention_launch._tiles

    def choose(arch: str, kind: Work, dtype: torch.dtype, padded: int, coded: bool) -> KVTiles:
        return tiles if kind == work else usual(arch, kind, dtype, padded, coded)

    with patch.object(attention_launch, "_tiles", choose):
        attention_launch._options.cache_clear()
        try:
            yield
        finally:
            attention_launch._options.cache_clear()
