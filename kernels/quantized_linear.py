"""Linear layers on int8 values, symmetric: one scale per output of the weight and per token of activations.

Weights are quantised at load without calibration data, and activations per token as they are computed (Dettmers et al.,
2022, "LLM.int8()", without its outlier columns). Activations are scaled per token rather than per tensor, so a row's
result does not depend on the other rows.

Weights and activations can be transformed before they are quantised: blocks of inputs are multiplied by a Hadamard
matrix H (Ashkboos et al., 2024, "QuaRot"). A few large values would otherwise make all other values of the row coarse;
H spreads them over their block. H is orthogonal up to a factor, so x W^T = (x H) (W H)^T / block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = 127  # -128 is not used, which keeps the range symmetric
# Outputs per product. Float64 copies of a head of 150,000 outputs would take gigabytes, and small parts fit the cache:
# 28 million weights are quantised in 0.08 s in parts of 1024 outputs, and in 0.6 s as a whole (two cores)
OUTPUTS_AT_ONCE = 1024
# Inputs that are transformed together. With SmolLM2-135M, blocks of 32 cause 1.4 times the error of 64, and larger
# blocks do not reduce it (docs/measurements/quantisation.md)
MAX_HADAMARD = 64


def hadamard_size(inputs: int) -> int:
    """Return the size of a Hadamard block: the largest power of two up to MAX_HADAMARD that divides `inputs`."""
    return min(MAX_HADAMARD, inputs & -inputs)


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply each block of `hadamard_size` values of each row by the Hadamard matrix, whose elements are 1 and -1.

    The fast Walsh-Hadamard transform adds in stages, neighbours first and halves of the block last. All implementations
    add in this order, so their bits are equal.

    Args:
        x: (..., K) floats.

    Returns:
        (..., K) float32.
    """
    block, distance, wide = hadamard_size(x.shape[-1]), 1, x.float().contiguous()
    while distance < block:
        first, second = wide.view(*wide.shape[:-1], -1, 2, distance).unbind(-2)
        wide = torch.stack((first + second, first - second), -2).flatten(-3)
        distance *= 2
    return wide


def check_quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `quantized_linear_reference` accepts."""
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ValueError(f"codes are {tuple(codes.shape)} {codes.dtype}, not a matrix of int8")
    if x.dim() != 2 or x.shape[1] != codes.shape[1] or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the weight has {codes.shape[1]} columns")
    if scales.shape != codes.shape[:1] or scales.dtype != torch.float32:
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, the weight has {len(codes)} rows")
    if bias is not None and bias.shape != codes.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, the weight has {len(codes)} rows")


def quantize_weight(weight: Tensor, hadamard: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a weight (N, K) to int8 with one scale per output: weight ≈ values × scales[:, None].

    The largest magnitude of an output becomes ±127; other values are rounded to nearest, ties to even. An output of
    zeros has scale 0, and one with a value that is not finite has scale NaN.

    Args:
        weight: (N, K) floats.
        hadamard: True to quantise the Hadamard transform of the weight, divided by the block size.

    Returns:
        Quantised values (N, K) int8, and scales (N,) float32.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, not a matrix of floats")
    parts = [
        quantize_rows(hadamard_transform(part) if hadamard else part)
        for part in torch.split(weight, OUTPUTS_AT_ONCE)
    ]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales) / (hadamard_size(weight.shape[1]) if hadamard else 1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (T, K) to int8 with one scale per row: x ≈ values × scales[:, None].

    A row of zeros has scale 0. A row with a NaN or an infinity has scale NaN, so its products are NaN instead of
    plausible numbers. Rows with magnitudes below 4e-37, where 127 ÷ magnitude overflows, become zeros.

    Returns:
        Quantised values (T, K) int8, and scales (T,) float32.
    """
    wide = x.float()
    inverse, scales = inverse_scales(wide, MAX_CODE)
    # float64 holds the exact product, so it is rounded once, as by a fused multiply-add
    scaled = wide.nan_to_num(0.0, 0.0, 0.0).double() * inverse.double()[..., None]
    return scaled.round().to(torch.int8), scales


def inverse_scales(wide: Tensor, max_code: float) -> tuple[Tensor, Tensor]:
    """Return the inverse scale and the scale of each row. The scale is the row's largest magnitude ÷ `max_code`.

    The inverse is 0 for rows that are not finite or too small; the scale of rows that are not finite is NaN.

    Args:
        wide: (..., K) float32.
        max_code: the quantised value of the largest magnitude.

    Returns:
        Two tensors (...) float32.
    """
    most = wide.abs().amax(-1) if wide.shape[-1] else wide.new_zeros(wide.shape[:-1])
    # A tensor, because torch divides a number by a tensor, and on a GPU a tensor by a number, with two roundings
    largest = torch.full_like(most, max_code)
    inverse, finite = largest / most, most.isfinite()
    inverse = torch.where(finite & inverse.isfinite(), inverse, 0.0)
    return inverse, torch.where(finite, most / largest, torch.nan)


def quantized_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, hadamard: bool = False
) -> Tensor:
    """Return x W^T + bias for an int8 weight, with x quantised per row: (T, N) in x's dtype.

    x is quantised to int8. The integer sums are exact. They are multiplied by row scale × output scale, and the bias is
    added, in float32; then the result is rounded.

    Args:
        x: (T, K) floats.
        codes: (N, K) int8, the values of the weight.
        scales: (N,) float32, the scale of each output.
        bias: (N,), or None.
        hadamard: True if the weight was transformed by `quantize_weight`; x is then transformed, too.
    """
    check_quantized_linear(x, codes, scales, bias)
    rows, row_scales = quantize_rows(hadamard_transform(x) if hadamard else x)
    left = rows.double()  # sums of int8 products stay far below 2^53, so float64 is exact
    parts = [left @ part.double().T for part in torch.split(codes, OUTPUTS_AT_ONCE)]
    sums = torch.cat(parts, 1) if parts else left.new_empty(len(left), 0)
    result = sums.float() * (row_scales[:, None] * scales)
    return (result if bias is None else result + bias.float()).to(x.dtype)
