"""RMSNorm, fused with a preceding residual addition. Cost: batchinfer_kernels.cost.rms_norm_cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import as_rows, check_same_dtype
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.rms_norm import check_rms_norm

# Rows up to this length are held in registers (32 values per thread with 16 warps); longer ones are read twice
LONGEST_HELD = 16_384
# Columns at a time in longer rows
PIECE = 8192


@triton.jit
def _total(x_ptr, residual_ptr, at, mask, HAS_RESIDUAL: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def scaled(x, weight, offset, OFFSET: tl.constexpr):
    """Return x × weight in the weight's dtype; x is float32.

    Without OFFSET, x is rounded to this dtype first. With OFFSET, the result is x × (offset + weight), rounded once.
    """
    if OFFSET:
        return (x * (offset + weight.to(tl.float32))).to(weight.dtype)
    return (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _store(
    y_ptr, total_ptr, weight_ptr, offset, total, scale, at, mask,
    HAS_RESIDUAL: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, scaled(total * scale, weight, offset, OFFSET), mask=mask)
    if HAS_RESIDUAL:
        tl.store(total_ptr + at, total.to(weight.dtype), mask=mask)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    hidden,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The order of a row's sum does not depend on other rows
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    y_ptr += row * hidden
    total_ptr += row * hidden
    columns = tl.arange(0, BLOCK)
    if HELD:
        mask = columns < hidden
        total = _total(x_ptr, residual_ptr, columns, mask, HAS_RESIDUAL)
        scale = tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
        _store(y_ptr, total_ptr, weight_ptr, offset, total, scale, columns, mask, HAS_RESIDUAL, OFFSET)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, hidden, BLOCK):
            at = start + columns
            total = _total(x_ptr, residual_ptr, at, at < hidden, HAS_RESIDUAL)
            squares += total * total
        scale = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)
        for start in range(0, hidden, BLOCK):
            at = start + columns
            total = _total(x_ptr, residual_ptr, at, at < hidden, HAS_RESIDUAL)
            _store(y_ptr, total_ptr, weight_ptr, offset, total, scale, at, at < hidden, HAS_RESIDUAL, OFFSET)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual, x + residual), as `rms_norm_reference` does.

    All tensors have one dtype.

    Args:
        x: (..., hidden); rows may be strided.
        weight: (hidden,).
        eps: added to the mean square.
        residual: as `x`; None: the second result is x itself.
        offset: if not 0, added to the weight.
    """
    check_rms_norm(x, weight, residual)
    check_same_dtype(x=x, weight=weight, residual=residual)
    rows, hidden = as_rows(x), x.shape[-1]
    other = rows if residual is None else as_rows(residual)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if rows.shape[0]:
        held = hidden <= LONGEST_HELD
        block = next_power_of_2(hidden) if held else PIECE
        places = (rows, other, weight.contiguous(), y, total)
        _rms_norm_kernel[(rows.shape[0],)](
            *places,
            *(rows.stride(0), other.stride(0), hidden, eps, offset),
            HAS_RESIDUAL=residual is not None,
            OFFSET=offset != 0,
            HELD=held,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return y.view(x.shape), x if residual is None else total.view(x.shape)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
