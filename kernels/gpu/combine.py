"""The weighted sum of the results of each token's experts. Cost: batchinfer_kernels.cost.combine_cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2

# 8 values per thread with 4 warps: 16 bytes of bfloat16
BLOCK = 1024


@triton.jit
def _combine_kernel(
    made_ptr, places_ptr, weights_ptr, y_ptr, chosen, width, stride, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(chosen):
        place = tl.load(places_ptr + token * chosen + choice)
        weight = tl.load(weights_ptr + token * chosen + choice)
        there = mask & (place >= 0)
        total += tl.load(made_ptr + place * stride + at, mask=there, other=0.0).to(tl.float32) * weight
    tl.store(y_ptr + token * width + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def combine(made: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the results of each token's experts: (T, N), added in float32.

    Results are added in the order of the token's choices, so a token's bits do not depend on other tokens.

    Args:
        made: (R, N), the results of rows sorted by expert; rows may be strided.
        places: (R,) int64, places[token × chosen + choice] is the row in `made` of that choice's result; -1: the choice
            has no result and adds nothing.
        weights: (T, chosen) float32; R is T × chosen.
    """
    if (
        made.dim() != 2
        or places.shape != made.shape[:1]
        or weights.numel() != len(made)
        or weights.dim() != 2
    ):
        raise ValueError(
            f"{tuple(made.shape)} results, places of {tuple(places.shape)}, weights {tuple(weights.shape)}"
        )
    check_same_dtype(made=made)
    unit_columns(made=made)
    tokens, chosen = weights.shape
    y = torch.empty(tokens, made.shape[1], dtype=made.dtype, device=made.device)
    if y.numel():
        block = min(BLOCK, next_power_of_2(y.shape[1]))
        grid = (tokens, cdiv(y.shape[1], block))
        _combine_kernel[grid](
            made, places, weights.contiguous(), y, chosen, y.shape[1], made.stride(0), BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
