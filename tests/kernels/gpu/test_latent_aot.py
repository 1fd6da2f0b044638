"""Compiles attention over latents for GPUs: nothing spills, and 64 rows use the larger instructions."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room, plan_attention
from batchinfer_kernels.gpu.latent_attention import latent_attention
from tests.examples import first_of
from tests.kernels.gpu.aot import NVIDIA, Compiled, compile_launch
from tests.kernels.gpu.test_attention_aot import PRODUCTS, REGISTERS

# Heads, rank, rotated values: of DeepSeek-V3, of its share on one of eight GPUs, and of sizes that fill no tile
LARGE, SHARE, ODD = (128, 512, 64), (16, 512, 64), (20, 100, 20)
WORKS = ("decode", "drafts", "prefill")


def launch_latents(work: str, dtype: str, heads: int, rank: int, turned: int, deterministic: bool) -> None:
    kind, width = getattr(torch, dtype), rank + turned
    each = 1 if work == "decode" else 4
    q, cache = torch.zeros(each, heads, width, dtype=kind), torch.zeros(4, 1, 16, width, dtype=kind)
    shape = AttentionShape(kind, heads, 1, width, deterministic, latent=True)
    room = None if work == "prefill" else Room(10_000, queries=each)
    plan = plan_attention([each], [5000], shape, "cpu", room=room)
    latent_attention(q, cache, torch.zeros(1, 512, dtype=torch.int32), plan, 0.3, rank)


def compiled(work: str, target: str, dtype: str, *sizes: int, deterministic: bool = False) -> Compiled:
    function = "tests.kernels.gpu.test_latent_aot:launch_latents"
    found = compile_launch(function, (work, dtype, *sizes, deterministic), target)
    assert len(found) == (1 if work == "prefill" else 2), "split results are merged"
    for kernel in found:
        kernel.check()
    _, rank, turned = sizes
    if target in NVIDIA and (rank + turned) % 16 == 0:  # as models have it
        assert found[0].wide_loads() > 0, found[0].summary()
    return found[0]


@pytest.mark.parametrize(
    ("work", "target", "sizes"),
    first_of(
        [("prefill", "sm_90", LARGE), ("decode", "sm_90", SHARE), *product(WORKS, NVIDIA, (LARGE, SHARE))], 2
    ),
)
def test_64_rows_are_multiplied_together(work: str, target: str, sizes: tuple[int, int, int]) -> None:
    kernel = compiled(work, target, "bfloat16", *sizes)
    few = work == "decode" and sizes == SHARE
    assert re.search(REGISTERS if few else PRODUCTS[target], kernel.ptx), kernel.summary()
    if few and target != "sm_100":
        copies = re.findall(r"\bLDGSTS\.E\.(?:\w+\.)*128", kernel.sass)
        assert len(copies) >= 8, "while a tile is multiplied, the next one travels"


def swept() -> list[Any]:
    found = product(WORKS, (*NVIDIA, "gfx942"), ("bfloat16", "float16"), (LARGE, SHARE, ODD), (False, True))
    single = product(WORKS, NVIDIA, ("float32",), (LARGE, ODD), (False, True))
    little_shared_memory = product(WORKS, ("sm_89",), ("bfloat16",), (LARGE, (64, 200, 40), ODD), (False,))
    return [*found, *single, *little_shared_memory]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "target", "dtype", "sizes", "deterministic"), swept())
def test_nothing_spills(
    work: str, target: str, dtype: str, sizes: tuple[int, int, int], deterministic: bool
) -> None:
    compiled(work, target, dtype, *sizes, deterministic=deterministic)
