"""Compiles prefill attention for compute capability 9.0 and checks the instructions.

It uses tensor copies, gives registers to the multiplying warps, and overlaps softmax with products. Nothing
spills.
"""

from __future__ import annotations

import re

import pytest
import torch

from batchinfer_kernels.gpu.attention_launch import padded_dim
from batchinfer_kernels.gpu.hopper_prefill import hopper_prefill
from batchinfer_kernels.gpu.hopper_tiles import (
    GROUPS,
    REGISTERS,
    REGISTERS_OF_CODES,
    TILE,
    Registers,
    hopper_tokens,
)
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from batchinfer_kernels.paged_attention import ScoreRules
from tests.examples import first_of
from tests.kernels.gpu.aot import STACK_LIMIT, Compiled, compile_launch
from tests.kernels.gpu.attention_cases import compiled_case

HERE = "tests.kernels.gpu.test_hopper_aot:launch"
# dtype, head size, heads that share a KV head, block size, window, soft cap (with sinks), codes
CASES = [
    ("bfloat16", 128, 4, 16, None, None, None),
    ("float16", 64, 7, 16, None, None, "int8"),
    ("bfloat16", 128, 4, 16, None, None, "float8_e4m3fn"),
    ("bfloat16", 64, 8, 16, 128, 30.0, None),
    ("bfloat16", 128, 4, 16, 4096, 30.0, None),
    ("bfloat16", 256, 2, 16, None, None, None),
    ("float16", 256, 8, 32, 1024, 50.0, None),
    ("bfloat16", 80, 3, 64, None, None, None),
    ("float16", 128, 8, 128, None, None, None),
    ("bfloat16", 128, 4, 32, 4096, 30.0, "int8"),
    ("bfloat16", 64, 4, 16, 4096, 30.0, "float8_e4m3fn"),
    ("float16", 80, 5, 16, None, None, "int8"),
]
# Bytes of stack for quantised values: common results of partitions are computed first, spilled, and read once by
# each
PUT_ASIDE = 80


def launch(
    dtype: str, dim: int, group: int, size: int, window: int | None, soft_cap: float | None, codes: str | None
) -> None:
    case, rules = compiled_case(((100, 300),), dtype, dim, group, size, soft_cap, codes)
    items = torch.from_numpy(prefill_items(case.queries, case.contexts, hopper_tokens(group)))
    scores, out = ScoreRules(0.2, window, **rules), torch.empty_like(case.q)
    hopper_prefill(*case.tensors, items, scores, out=out, **case.scaling)


def loops(sass: str) -> list[str]:
    """Return each warp group's instructions between the scores and the product with values."""
    return re.findall(r"DEPBAR\.LE gsb0, 0x1\b(.*?)DEPBAR\.LE gsb0, 0x0\b", sass, re.DOTALL)


@pytest.mark.parametrize(("dtype", "dim", "group", "size", "window", "soft_cap", "codes"), first_of(CASES, 1))
def test_products_copies_and_softmax_go_on_together(dtype, dim, group, size, window, soft_cap, codes) -> None:
    (kernel,) = compile_launch(HERE, (dtype, dim, group, size, window, soft_cap, codes), "sm_90")
    kernel.check(stack=STACK_LIMIT if codes is None else PUT_ASIDE)
    tile = TILE[padded_dim(dim)]
    assert_loads(kernel, 2 * (tile // size) * -(-padded_dim(dim) // (64 if codes is None else 128)))
    assert_registers(kernel, REGISTERS if codes is None else REGISTERS_OF_CODES)
    # A product of a tile's keys by 16 values of the head, and by 16 of its keys
    assert kernel.ptx.count("wgmma.mma_async") == GROUPS * 2 * (padded_dim(dim) // 16 + tile // 16)
    assert kernel.ptx.count("wgmma.wait_group.sync.aligned 1") == GROUPS
    exponentials = 64 * tile // 128  # a thread's
    for loop in loops(kernel.sass):
        assert loop.count("MUFU.EX2") >= exponentials, "a softmax overlaps with a product"
        assert not re.search(r"HGMMA|\bSTL|\bLDL", loop)
    assert len(loops(kernel.sass)) == GROUPS


def assert_loads(kernel: Compiled, copies: int) -> None:
    """Assert that tensor copies load 128 bytes per key of a page, and threads load no keys or values."""
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.shared", kernel.ptx)) == copies
    assert "ld.local" not in kernel.ptx


def assert_registers(kernel: Compiled, registers: Registers) -> None:
    """Assert that the multiplying warps get the registers."""
    taken = {int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 \t(\d+)", kernel.ptx)}
    assert {registers.multiplier, registers.loader} | {registers.widener} - {0} <= taken
    assert kernel.registers == registers.launched
