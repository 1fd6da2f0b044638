"""Linear layers with int4 weights, in groups of inputs, and int8 activations: what a CPU multiplies.

A weight is (codes - zeros) × scales, codes in -8 … 7, with a scale and maybe a zero for each output and group of inputs,
as in Frantar et al., 2023, "GPTQ", and Lin et al., 2024, "AWQ". Activations are quantised by row, as in
batchinfer_kernels.quantized_linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.quantized_linear import quantize_rows

LEAST_CODE, MOST_CODE = -8, 7


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight: (N, K) of floats → codes (N, K) int8 in -8 … 7 and scales (N, ceil(K / group)) float32, rounded to nearest.

    The value of the largest magnitude in a group becomes -8, which int4 has and 8 it has not. A group of zeros has scale
    0; one with a value that is no finite number has scale NaN. Raises ValueError for any other tensor.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or group < 1:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, in groups of {group}")
    missing = -weight.shape[1] % group
    values = torch.nn.functional.pad(weight.float(), (0, missing)).view(len(weight), -1, group)
    places = values.abs().argmax(-1, keepdim=True)
    extreme = values.gather(-1, places)[..., 0]
    scales = torch.where(values.isfinite().all(-1), extreme / LEAST_CODE, torch.nan)
    inverse = torch.where(scales.abs() > 0, 1 / scales, 0.0)
    codes = (values * inverse[..., None]).nan_to_num(0).round().clamp(LEAST_CODE, MOST_CODE).to(torch.int8)
    return codes.view(len(weight), -1)[:, : weight.shape[1]].contiguous(), scales


def int4_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bias: Tensor | None = None
) -> Tensor:
    """x: (T, K) → (T, N) in x's dtype: x is quantised by row; sums of groups are exact integers, scaled and added up in
    float64, multiplied with the row's scale, and the bias is added.

    codes: (N, K) int8; scales, zeros: (N, ceil(K / group)).
    """
    rows, row_scales = quantize_rows(x)
    groups = torch.arange(codes.shape[1]) // group
    steps = codes.double() if zeros is None else codes.double() - zeros.double()[:, groups]
    result = (rows.double() @ (steps * scales.double()[:, groups]).T) * row_scales.double()[:, None]
    return (result if bias is None else result + bias.double()).to(x.dtype)
