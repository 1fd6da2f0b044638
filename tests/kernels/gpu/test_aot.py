"""Tests this folder's tools: they report the compiler's statistics, and interpreted kernels are right."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.gpu.aot import NVIDIA, TARGETS, Compiled, compile_launch
from tests.kernels.gpu.interpreter import fused, to_float8


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


def compiled(launch: str, target: str, *arguments: int) -> Compiled:
    (found,) = compile_launch(f"tests.kernels.gpu.test_aot:{launch}", arguments, target)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_compiles_as_it_is_specialised(target: str) -> None:
    aligned, odd = (compiled("launch_double", target, n, 1024) for n in (4096, 4095))
    aligned.check()
    assert aligned.registers > 0
    assert aligned.shared == 0
    if target in NVIDIA:
        assert aligned.wide_loads() == aligned.wide_stores() == 1
        assert odd.wide_loads() == 0  # the end of the mask may lie inside any 16 bytes


def test_a_kernel_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="power of 2"):
        compiled("launch_double", "sm_90", 4096, 1000)


def test_bfloat16_is_right_and_other_processes_are_not_affected() -> None:
    x = torch.linspace(-3, 3, 100).bfloat16()
    assert torch.equal(launch_double(100, 64), x + x)
    assert "TRITON_INTERPRET" not in os.environ


def test_a_fused_multiply_add_rounds_once() -> None:
    """0.5 - 2^-47 is added to an odd number: float64 would round it to a half, which rounds up to even."""
    one = np.float32(2.0**-23)
    x, y, z = (np.array([v], np.float32) for v in (1 + one, (1 - one) / 2, 12582913.0))
    assert fused(x, y, z).tolist() == [12582913.0]
    assert fused(x, np.float32(0.5) * x, z).tolist() == [12582914.0]
    assert np.isnan(fused(x, y, np.array([np.nan], np.float32))).all()


def test_a_mantissa_that_is_rounded_up_carries_in_float8() -> None:
    bits = to_float8(np.array([1.9375, 1.97, -448.0, 0.0], np.float32))
    assert torch.from_numpy(bits).view(torch.float8_e4m3fn).tolist() == [2.0, 2.0, -448.0, 0.0]
