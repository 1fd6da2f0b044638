"""The tools of this folder: what they report is what the compiler said, and what is interpreted is right."""

from __future__ import annotations

import os
from itertools import combinations, product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.gpu.aot import TARGETS, compile_for, compile_launch
from tests.kernels.gpu.crowded import crowded_product_kernel
from tests.kernels.gpu.interpreter import fused, to_float8
from tests.kernels.gpu.pairs import every_pair


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x + x * 1.0, mask=at < n)


def launch_double(n: int, block: int) -> torch.Tensor:
    x = torch.linspace(-3, 3, n).bfloat16()
    y = torch.empty_like(x)
    _double_kernel[(triton.cdiv(n, block),)](x, y, n, BLOCK=block)
    return y


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_compiles_for_a_signature(target: str) -> None:
    types = {"x_ptr": "*bf16:16", "y_ptr": "*bf16:16", "n": "i32:16"}
    found = compile_for(_double_kernel, types, {"BLOCK": 1024}, target, num_warps=4)
    found.check()
    assert found.registers > 0
    assert found.shared == 0
    if target != "gfx942":
        assert found.wide_loads() == found.wide_stores() == 1


def test_a_launch_compiles_as_it_is_specialised() -> None:
    (aligned,) = compile_launch("tests.kernels.gpu.test_aot:launch_double", (4096, 1024), "sm_90")
    (odd,) = compile_launch("tests.kernels.gpu.test_aot:launch_double", (4095, 1024), "sm_90")
    assert aligned.wide_loads() == 1
    assert odd.wide_loads() == 0  # the end of the mask may lie inside any 16 bytes


def test_a_kernel_that_does_not_compile_says_so() -> None:
    with pytest.raises(RuntimeError, match="BLOCK"):
        compile_for(_double_kernel, {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}, {}, "sm_90")


def test_bfloat16_is_right_and_other_processes_are_not_affected() -> None:
    x = torch.linspace(-3, 3, 100).bfloat16()
    assert torch.equal(launch_double(100, 64), x + x)
    assert "TRITON_INTERPRET" not in os.environ


def test_a_fused_multiply_add_rounds_once() -> None:
    """0.5 - 2^-47 is added to an odd number: as float64 that would be a half, which goes up to the even one."""
    one = np.float32(2.0**-23)
    x, y, z = (np.array([v], np.float32) for v in (1 + one, (1 - one) / 2, 12582913.0))
    assert fused(x, y, z).tolist() == [12582913.0]
    assert fused(x, np.float32(0.5) * x, z).tolist() == [12582914.0]
    assert np.isnan(fused(x, y, np.array([np.nan], np.float32))).all()


def test_a_mantissa_that_is_rounded_up_carries_in_float8() -> None:
    bits = to_float8(np.array([1.9375, 1.97, -448.0, 0.0], np.float32))
    assert torch.from_numpy(bits).view(torch.float8_e4m3fn).tolist() == [2.0, 2.0, -448.0, 0.0]


def test_a_thinned_sweep_has_each_pair_and_few_cases() -> None:
    axes = [["a", "b", "c"], [1, 2], [None, 0.5, 1.5, 2.5], [False, True]]
    cases = every_pair(*axes)
    for i, j in combinations(range(len(axes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(axes[i], axes[j]))
    assert 12 <= len(cases) <= 14  # of 48
    with pytest.raises(ValueError, match="two axes"):
        every_pair([1, 2])


def test_products_that_the_assembler_serialises_are_seen() -> None:
    """Tensor cores then wait for each product before the next one begins."""
    types = {"a_ptr": "*bf16:16", "b_ptr": "*bf16:16", "out_ptr": "*fp32:16", "k": "i32:16"}
    sizes = {"M": 128, "N": 256, "K": 64}
    for _ in range(2):  # compiled, and found in the cache
        crowded = compile_for(crowded_product_kernel, types, sizes, "sm_90", num_warps=4, num_stages=3)
        assert "serialized" in " ".join(crowded.losses)
        with pytest.raises(AssertionError, match="serialized"):
            crowded.check()
    compile_for(crowded_product_kernel, types, {**sizes, "N": 64}, "sm_90", num_warps=4, num_stages=3).check()
