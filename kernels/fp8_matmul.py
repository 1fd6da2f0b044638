"""Linear layers on float8_e4m3fn values: the weight scaled per output, activations per token.

The format has 4 exponent bits and 3 mantissa bits (Micikevicius et al., 2022, "FP8 formats for deep learning").
Activations are scaled per token rather than per tensor, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.matmul import check_matmul, finish_product, products
from batchinfer_kernels.quantized_linear import inverse_scales

MAX_FP8 = 448.0  # the largest finite float8_e4m3fn
FP8 = torch.float8_e4m3fn
ROWS_AT_ONCE = 8192  # bounds memory: the float32 copy of a whole head would take gigabytes


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of x (T, K) to float8_e4m3fn: x ≈ values × scales[:, None].

    The largest magnitude of a row becomes ±448; other values are rounded to nearest, ties to even. A row of zeros has
    scale 0. A row with a NaN or an infinity has scale NaN, so its products are NaN. Rows with magnitudes below 1.4e-36,
    where 448 ÷ magnitude overflows, become zeros.

    Args:
        x: floats; tokens and inputs, or outputs and inputs of a weight.

    Returns:
        Values (T, K) float8_e4m3fn and scales (T,) float32.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, not a matrix of floats")
    coded = [_quantized(part) for part in torch.split(x, ROWS_AT_ONCE)]
    codes, scales = zip(*coded, strict=True)
    return torch.cat([c.view(torch.uint8) for c in codes]).view(FP8), torch.cat(scales)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    inverse, scales = inverse_scales(wide, MAX_FP8)
    scaled = (wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]).clamp(-MAX_FP8, MAX_FP8)
    return scaled.to(FP8), scales


def fp8_matmul_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Return x W^T + bias for a float8_e4m3fn weight: (T, N), or (T, N / 2) with an activation.

    x is quantised to float8 per row. The float32 sums are multiplied by the scales of the row and of the output.

    Args:
        x: (T, K) floats.
        codes: (N, K) float8_e4m3fn, the values of the weight.
        scales: (N,) float32, the scale of each output.
        bias: (N,), or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None; see `matmul_reference`.
    """
    check_fp8_matmul(x, codes, scales, bias, out_dtype, activation)
    rows, row_scales = quantize_rows_fp8(x)
    sums = products(rows, codes) * (row_scales[:, None] * scales)
    return finish_product(sums, bias, out_dtype or x.dtype, activation)


def check_fp8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `fp8_matmul_reference` accepts."""
    check_matmul(x, codes.shape, bias, out_dtype, activation)
    if codes.dtype != FP8:
        raise ValueError(f"codes are {codes.dtype}, not {FP8}")
    if scales.shape != codes.shape[:1] or scales.dtype != torch.float32:
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, the weight has {len(codes)} rows")
