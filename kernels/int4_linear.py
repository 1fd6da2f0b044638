"""Linear layers with int4 weights, in groups of inputs, and int8 activations: what a CPU multiplies.

A weight is (codes - zeros) × scales, codes in -8 … 7, with a scale and maybe a zero for each output and group of
inputs, as in Frantar et al., 2023, "GPTQ", and Lin et al., 2024, "AWQ". Activations are quantised by row, as in
batchinfer_kernels.quantized_linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.quantized_linear import quantize_rows

LEAST_CODE, MOST_CODE = -8, 7
SHARES = (
    1.0,
    0.95,
    0.9,
    0.85,
    0.8,
    0.75,
)  # of the largest magnitude of a group, which becomes the least code
VALUES_AT_ONCE = 1 << 17  # whose float32 copies stay in a cache: four times as fast as a million


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight: (N, K) of floats → codes (N, K) int8 in -8 … 7 and scales (N, ceil(K / group)) float32.

    Values are rounded to nearest, with that scale of a few that leaves the least square error. With the largest of them
    the value of the largest magnitude becomes -8, which int4 has and 8 it has not. A group of zeros has scale 0; one
    with a value that is no finite number has scale NaN. Raises ValueError for any other tensor.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or group < 1:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, in groups of {group}")
    at_once = max(1, VALUES_AT_ONCE // max(1, weight.shape[1]))
    parts = [_quantized(part, group) for part in torch.split(weight, at_once)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantized(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    missing = -weight.shape[1] % group
    values = torch.nn.functional.pad(weight.float(), (0, missing)).view(len(weight), -1, group)
    finite = values.isfinite().all(-1)
    values = values.nan_to_num(0.0, 0.0, 0.0)
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))[..., 0]
    best, least = extreme / LEAST_CODE, torch.full_like(extreme, torch.inf)
    for share in SHARES:
        scales = extreme * share / LEAST_CODE
        wanted = values * _inverse(scales)
        error = wanted.round().clamp_(LEAST_CODE, MOST_CODE).sub_(wanted).square_().sum(-1) * scales.square()
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    codes = (values * _inverse(best)).round_().clamp_(LEAST_CODE, MOST_CODE).to(torch.int8)
    codes = codes.view(len(weight), -1)[:, : weight.shape[1]]
    return codes.contiguous(), torch.where(finite, best, torch.nan)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() > 0, 1 / scales, 0.0)[..., None]


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
