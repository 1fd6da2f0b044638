"""Linear layers on int8 codes: the weight symmetric per output channel, activations symmetric per token.

Quantised once at load, a weight needs no calibration data: each output has a scale of its own, and each row of
activations gets one when it is met (Dettmers et al., 2022, "LLM.int8()", without its outlier columns). Scales per row
and not per tensor: no row's numbers depend on another row's.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = 127  # -128 stays unused: with it a code's negative would have no code
# Outputs taken at once: float64 copies of a whole head of 150,000 outputs would take gigabytes. Smaller parts also stay
# in the cache: 28 million weights are quantised in 0.08 s in parts of 1024 outputs, in 0.6 s in one piece (two cores).
OUTPUTS_AT_ONCE = 1024


def check_quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ValueError(f"codes are {tuple(codes.shape)} {codes.dtype}, not a matrix of int8")
    if x.dim() != 2 or x.shape[1] != codes.shape[1] or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the weight has {codes.shape[1]} columns")
    if scales.shape != codes.shape[:1] or scales.dtype != torch.float32:
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, the weight has {len(codes)} rows")
    if bias is not None and bias.shape != codes.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, the weight has {len(codes)} rows")


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: (N, K) → codes (N, K) int8 and scales (N,) float32, weight ≈ codes × scales[:, None].

    The largest magnitude of an output becomes ±127, the rest is rounded to nearest, ties to even. An output of zeros
    has scale 0; one with a value that is no finite number has scale NaN, as a row of activations does.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, not a matrix of floats")
    parts = [quantize_rows(part) for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (T, K) → codes (T, K) int8 and scales (T,) float32, x ≈ codes × scales[:, None].

    A row of zeros has scale 0, and so zeros as its result. A row with a NaN or an infinity has scale NaN: whatever it
    is multiplied with becomes NaN, so that a broken activation is noticed and not clamped into a plausible number.
    Rows below 4e-37, where 127 ÷ magnitude overflows, become zeros.
    """
    wide = x.float()
    inverse, scales = inverse_scales(wide, MAX_CODE)
    # The exact product is rounded once, as a fused multiply-add does it: float64 holds it
    scaled = wide.nan_to_num(0.0, 0.0, 0.0).double() * inverse.double()[..., None]
    return scaled.round().to(torch.int8), scales


def inverse_scales(wide: Tensor, max_code: float) -> tuple[Tensor, Tensor]:
    """wide: (..., K) float32 → the codes a value and the scale of each row, (...), whose largest magnitude becomes
    `max_code`. Rows that are no finite number, or too small, have 0 codes a value; the first have NaN as their scale.
    """
    most = wide.abs().amax(-1) if wide.shape[-1] else wide.new_zeros(wide.shape[:-1])
    # No number: torch divides one by a tensor, and on a GPU a tensor by one, with a reciprocal, rounded twice
    largest = torch.full_like(most, max_code)
    inverse, finite = largest / most, most.isfinite()
    inverse = torch.where(finite & inverse.isfinite(), inverse, 0.0)
    return inverse, torch.where(finite, most / largest, torch.nan)


def quantized_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x: (T, K) → (T, N) in x's dtype: x is quantised by row, the sums are exact integers.

    A sum becomes float32, is multiplied with row scale × channel scale, and the bias is added in float32: one rounding
    to x's dtype at the end.
    """
    check_quantized_linear(x, codes, scales, bias)
    rows, row_scales = quantize_rows(x)
    left = rows.double()  # sums of products of codes stay far below 2^53, so float64 adds them exactly
    parts = [left @ part.double().T for part in torch.split(codes, OUTPUTS_AT_ONCE)]
    sums = torch.cat(parts, 1) if parts else left.new_empty(len(left), 0)
    result = sums.float() * (row_scales[:, None] * scales)
    return (result if bias is None else result + bias.float()).to(x.dtype)
