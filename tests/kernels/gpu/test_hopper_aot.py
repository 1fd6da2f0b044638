"""Prompts' attention for compute capability 9.0, compiled: it loads by tensor copies, gives registers to who
multiplies, and computes softmax beside products. Nothing spills."""

from __future__ import annotations

import re

import pytest
import torch

from batchinfer_kernels.gpu.attention_launch import padded_dim
from batchinfer_kernels.gpu.hopper_prefill import hopper_prefill
from batchinfer_kernels.gpu.hopper_tiles import GROUPS, TILE, hopper_tokens
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from tests.examples import first_of
from tests.kernels.gpu.aot import Compiled, compile_launch
from tests.kernels.gpu.attention_cases import compiled_case

HERE = "tests.kernels.gpu.test_hopper_aot:launch"
CASES = [
    ("bfloat16", 128, 4, 16, None, None),
    ("float16", 64, 7, 16, None, None),
    ("bfloat16", 128, 4, 16, 4096, 30.0),
    ("bfloat16", 256, 2, 16, None, None),
    ("float16", 256, 8, 32, 1024, 50.0),
    ("bfloat16", 80, 3, 64, None, None),
    ("float16", 128, 8, 128, None, None),
    ("bfloat16", 64, 8, 16, 128, 30.0),
]


def launch(dtype: str, dim: int, group: int, size: int, window: int | None, soft_cap: float | None) -> None:
    case, rules = compiled_case(((100, 300),), dtype, dim, group, size, soft_cap, None)
    items = torch.from_numpy(prefill_items(case.queries, case.contexts, hopper_tokens(group)))
    hopper_prefill(*case.tensors, items, 0.2, window, out=torch.empty_like(case.q), **rules)


def loops(sass: str) -> list[str]:
    """What each warp group does from when scores are there until values are multiplied."""
    return re.findall(r"DEPBAR\.LE gsb0, 0x1\b(.*?)DEPBAR\.LE gsb0, 0x0\b", sass, re.DOTALL)


@pytest.mark.parametrize(("dtype", "dim", "group", "size", "window", "soft_cap"), first_of(CASES, 2))
def test_products_copies_and_softmax_go_on_together(dtype, dim, group, size, window, soft_cap) -> None:
    (kernel,) = compile_launch(HERE, (dtype, dim, group, size, window, soft_cap), "sm_90")
    kernel.check()
    tile = TILE[padded_dim(dim)]
    assert_loads(kernel, 2 * (tile // size) * -(-dim // 64))
    # A product of a tile's keys by 16 values of the head, and by 16 of its keys
    assert kernel.ptx.count("wgmma.mma_async") == GROUPS * 2 * (padded_dim(dim) // 16 + tile // 16)
    assert kernel.ptx.count("wgmma.wait_group.sync.aligned 1") == GROUPS
    exponentials = 64 * tile // 128  # a thread's
    for loop in loops(kernel.sass):
        assert loop.count("MUFU.EX2") >= exponentials, "a softmax runs beside a product"
        assert "HGMMA" not in loop
    assert len(loops(kernel.sass)) == GROUPS


def assert_loads(kernel: Compiled, copies: int) -> None:
    """No thread loads keys or values, and registers are given to who multiplies."""
    # Tensor copies are of 64 values of each of a page's keys
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.shared", kernel.ptx)) >= copies
    assert "setmaxnreg.dec.sync.aligned.u32 \t40" in kernel.ptx
    assert "setmaxnreg.inc.sync.aligned.u32 \t232" in kernel.ptx
    assert "ld.local" not in kernel.ptx
