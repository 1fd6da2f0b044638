"""Quantises rows of activations to int8 or float8_e4m3fn, with one scale per row or group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import GROUP
from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.quantized_linear import hadamard_size

# Rows up to this length are held in registers (16 values per thread with 16 warps); longer ones are read twice
LONGEST_HELD = 8192
GROUPS_AT_ONCE = 16  # groups of 128 values per program, 16 values per thread
# Adding this to a number below 2^22 rounds the number to the nearest integer, ties to even
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def codes_of(x, inverse, dtype: tl.constexpr, MOST: tl.constexpr):
    """Quantise x: round x × inverse to `dtype`, int8 or float8_e4m3fn, to nearest, ties to even.

    `inverse` is the inverse of the scale. A float8 is clamped to ±MOST.
    """
    if dtype == tl.int8:
        # fma rounds once: the product is not rounded before ROUNDER is added
        return (tl.fma(x, inverse, ROUNDER) - ROUNDER).to(tl.int8)
    else:
        return tl.clamp(x * inverse, -MOST, MOST).to(dtype)


@triton.jit
def inverse_scale(most, MOST: tl.constexpr):
    """Return the inverse scale and the scale of rows that are quantised to ±MOST.

    `most` is the largest magnitude of each row, infinite if the row has a NaN or an infinity. The inverse is then 0 and
    the scale NaN.
    """
    inverse = tl.div_rn(MOST, tl.where(most > 0, most, 1.0))
    usable = (most > 0) & (most < float("inf")) & (inverse < float("inf"))
    scale = tl.where(most < float("inf"), tl.div_rn(most, MOST), float("nan"))
    return tl.where(usable, inverse, 0.0), scale


@triton.jit
def hadamard_transform(x, SIZE: tl.constexpr, HADAMARD: tl.constexpr):
    """Transform each block of HADAMARD of SIZE values, in the stages of the reference, so that the bits are equal.

    HADAMARD 1 changes nothing.
    """
    # The stages are unrolled because each has its own shape
    for stage in tl.static_range(6):
        if 2 << stage <= HADAMARD:
            pairs = tl.permute(tl.reshape(x, (SIZE >> (stage + 1), 2, 1 << stage)), (0, 2, 1))
            first, second = tl.split(pairs)
            pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
            x = tl.reshape(pairs, (SIZE,))
    return x


@triton.jit
def _quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, stride_x, inputs, MOST: tl.constexpr, HELD: tl.constexpr,
    BLOCK: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    codes_ptr += row * inputs
    infinity = float("inf")
    at = tl.arange(0, BLOCK)
    if HELD:
        x = tl.load(x_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
        x = hadamard_transform(x, BLOCK, HADAMARD)
        size = tl.abs(x)
        # NaN counts as infinity, because a maximum would ignore it
        most = tl.max(tl.where(size <= infinity, size, infinity), 0)
        inverse, scale = inverse_scale(most, MOST)
        x = tl.where(size < infinity, x, 0.0)
        tl.store(codes_ptr + at, codes_of(x, inverse, codes_ptr.dtype.element_ty, MOST), mask=at < inputs)
    else:
        tops = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, inputs, BLOCK):
            x = tl.load(x_ptr + start + at, mask=start + at < inputs, other=0.0).to(tl.float32)
            x = hadamard_transform(x, BLOCK, HADAMARD)
            size = tl.abs(x)
            tops = tl.maximum(tops, tl.where(size <= infinity, size, infinity))
        inverse, scale = inverse_scale(tl.max(tops, 0), MOST)
        for start in range(0, inputs, BLOCK):
            mask = start + at < inputs
            x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
            x = hadamard_transform(x, BLOCK, HADAMARD)
            x = tl.where(tl.abs(x) < infinity, x, 0.0)
            codes = codes_of(x, inverse, codes_ptr.dtype.element_ty, MOST)
            tl.store(codes_ptr + start + at, codes, mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["stride_scales"])
def _quantize_groups_kernel(
    x_ptr, codes_ptr, scales_ptr, stride_x, inputs, stride_scales, MOST: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    infinity = float("inf")
    x = tl.load(x_ptr + row * stride_x + at, mask=at < inputs, other=0.0).to(tl.float32)
    size = tl.abs(x)
    inverse, scale = inverse_scale(tl.max(tl.where(size <= infinity, size, infinity), 1), MOST)
    x = tl.where(size < infinity, x, 0.0)
    codes = codes_of(x, inverse[:, None], codes_ptr.dtype.element_ty, MOST)
    tl.store(codes_ptr + row * inputs + at, codes, mask=at < inputs)
    tl.store(scales_ptr + group.to(tl.int64) * stride_scales + row, scale, mask=group * GROUP < inputs)


def quantize_rows(x: Tensor, hadamard: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise x (T, K) to int8 with one scale per row: x ≈ values × scales[:, None]. Rows may be strided.

    Args:
        x: (T, K).
        hadamard: True to quantise the Hadamard transform of x; see batchinfer_kernels.quantized_linear.

    Returns:
        Values (T, K) int8 and scales (T,) float32.
    """
    return _quantized(x, torch.int8, 127.0, hadamard_size(x.shape[-1]) if hadamard else 1)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (T, K) to float8_e4m3fn with one scale per row: x ≈ values × scales[:, None]. Rows may be strided.

    Returns:
        Values (T, K) float8_e4m3fn and scales (T,) float32.
    """
    return _quantized(x, torch.float8_e4m3fn, 448.0)


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (T, K) to float8_e4m3fn with one scale per row and group of 128 inputs. Rows may be strided.

    Returns:
        Values (T, K) float8_e4m3fn and scales (ceil(K / 128), T) float32.
    """
    _check(x)
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(cdiv(inputs, GROUP), rows, dtype=torch.float32, device=x.device)
    if codes.numel():
        at_once = min(GROUPS_AT_ONCE, next_power_of_2(len(scales)))
        _quantize_groups_kernel[(rows, cdiv(len(scales), at_once))](
            x, codes, scales, x.stride(0), inputs, rows, MOST=448.0, GROUPS=at_once, GROUP=GROUP,
            num_warps=max(1, at_once // 4), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def _quantized(x: Tensor, dtype: torch.dtype, most: float, hadamard: int = 1) -> tuple[Tensor, Tensor]:
    _check(x)
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        held = inputs <= LONGEST_HELD
        block = next_power_of_2(max(16, inputs)) if held else LONGEST_HELD // 2
        sizes = (x.stride(0), inputs)
        _quantize_rows_kernel[(rows,)](
            x, codes, scales, *sizes, MOST=most, HELD=held, BLOCK=block, HADAMARD=hadamard,
            num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def _check(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}, not a matrix")
    check_same_dtype(x=x)
    unit_columns(x=x)
