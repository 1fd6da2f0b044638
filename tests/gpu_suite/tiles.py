"""Measures attention with tiles other than the chosen ones, to find better ones for this GPU."""

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
from tests.gpu_suite.case import DTYPE, Case, described, measured
from tests.gpu_suite.paged import Heads
from tests.suite.section import BenchSection, Part, Result

QWEN_HALF_B = Heads(14, 2, 64, 16)  # head size 64, as in small models
FEW = 3  # number of candidates for small heads
# rows, keys, warps, stages; the most promising first
_WIDE = ((64, 64, 4, 5), (128, 128, 8, 3), (128, 64, 8, 5), (128, 64, 8, 3), (64, 128, 4, 3), (128, 32, 8, 5))
_NARROW = ((16, 128, 8, 3), (16, 64, 4, 5), (16, 128, 4, 3), (16, 64, 2, 6), (16, 64, 8, 4), (16, 32, 4, 6))
Candidates = dict[Work, tuple[tuple[int, int, int, int], ...]]
CANDIDATES: Candidates = {"prefill": _WIDE, "decode": _NARROW, "prefix": _WIDE}
TINY_CANDIDATES: Candidates = {
    "prefill": ((32, 32, 4, 1),),
    "decode": ((16, 32, 4, 1),),
    "prefix": ((32, 64, 4, 1),),
}


def parts(section: BenchSection) -> list[Part]:
    """Return a part per kind of kernel, head size and candidate: first the sizes of large models, then small ones
    with the most promising candidates.

    A rehearsal has each kind once.
    """
    if section.rehearsal:
        return list(_candidates(section, attention.TINY, TINY_CANDIDATES, 1))
    large = _candidates(section, attention.LLAMA_8B, CANDIDATES, None)
    return [*large, *_candidates(section, QWEN_HALF_B, CANDIDATES, FEW)]


def _candidates(
    section: BenchSection, heads: Heads, candidates: Candidates, most: int | None
) -> Iterator[Part]:
    makers = cases(section, heads)
    for work, tried in candidates.items():
        for sizes in tried[:most]:
            name = f"{work} at heads of {heads.dim} with {sizes}"
            yield name, partial(_measured, section, heads, work, KVTiles(*sizes), makers[work])


def cases(section: BenchSection, heads: Heads) -> dict[Work, Callable[[], Case]]:
    """Return the case of attention for each kind of kernel."""
    decode, prefill, prefix = [4096] * 64, (1, 4096, 4096), (256, 8192, 128)
    if section.rehearsal:
        decode, prefill, prefix = [33, 17], (1, 20, 40), (4, 256, 3)
    return {
        "decode": partial(attention.decode_case, section, heads, decode),
        "prefill": partial(attention.prefill_case, section, heads, *prefill),
        "prefix": partial(attention.prefix_case, section, heads, *prefix),
    }


def _measured(
    section: BenchSection, heads: Heads, work: Work, tiles: KVTiles, make: Callable[[], Case]
) -> Result:
    """Check a candidate and time it in turns with the chosen tiles; report it if the GPU has no room for it."""
    usual = make()
    chosen = attention_launch.choose_tiles(work, DTYPE, heads.dim)
    with instead(work, tiles):
        case = make()

    def tiled() -> Any:
        with instead(work, tiles):
            return case.ours()

    tried = replace(
        case,
        size=f"{case.size}, heads of {heads.dim}, tiles {astuple(tiles)}",
        ours=tiled,
        others={"the chosen tiles": usual.ours},
        targets={},
    )
    try:
        found = measured(section, tried)
    except OutOfResources:
        found = replace(described(tried), metrics={"tiles": "do not fit"})
    facts = {**found.facts, "chosen": "these" if chosen == tiles else str(astuple(chosen))}
    return replace(found, facts=facts)


@contextmanager
def instead(work: Work, tiles: KVTiles) -> Iterator[None]:
    """Replace the tiles of this kind of kernel in plans, and clear the launch cache."""
    usual = attention_launch._tiles

    def choose(arch: str, kind: Work, dtype: torch.dtype, padded: int, coded: bool) -> KVTiles:
        return tiles if kind == work else usual(arch, kind, dtype, padded, coded)

    with patch.object(attention_launch, "_tiles", choose):
        attention_launch._options.cache_clear()
        try:
            yield
        finally:
            attention_launch._options.cache_clear()
