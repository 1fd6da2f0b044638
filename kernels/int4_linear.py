"""Linear layers with int4 weights in groups of inputs and int8 activations, as the CPU multiplies them.

A weight is (values - zeros) × scales, with values in -8 … 7, and a scale and optionally a zero point per output and
group of inputs, as in GPTQ (Frantar et al., 2023) and AWQ (Lin et al., 2024). Activations are quantised as in
batchinfer_kernels.quantized_linear, but with a scale per row and group: a large value makes only its group coarse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.quantized_linear import quantize_rows

LEAST_CODE, MAX_CODE = -8, 7
# Shares of a group's largest magnitude that are tried as the magnitude of LEAST_CODE
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
VALUES_AT_ONCE = 1 << 17  # their float32 copies fit the cache: four times as fast as a million at once


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise a weight (N, K) of floats to int4, with a scale per output and group of inputs.

    Of a few candidate scales, each group gets the one with the least squared error. A group of zeros has scale 0, and a
    group with a value that is not finite has scale NaN.

    Args:
        weight: (N, K) floats; N outputs, K inputs.
        group: number of inputs that share a scale.

    Returns:
        Quantised values (N, K) int8 in -8 … 7, and scales (N, ceil(K / group)) float32.

    Raises:
        ValueError: If `weight` is not a matrix of floats.
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
        error = wanted.round().clamp_(LEAST_CODE, MAX_CODE).sub_(wanted).square_().sum(-1) * scales.square()
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    codes = (values * _inverse(best)).round_().clamp_(LEAST_CODE, MAX_CODE).to(torch.int8)
    codes = codes.view(len(weight), -1)[:, : weight.shape[1]]
    return codes.contiguous(), torch.where(finite, best, torch.nan)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() > 0, 1 / scales, 0.0)[..., None]


def int4_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bias: Tensor | None = None
) -> Tensor:
    """Return x W^T + bias for an int4 weight: (T, N) in x's dtype.

    Each group of x is quantised to int8. The exact integer sum of each group is multiplied by the scales of weight and
    activations. The groups and the bias are added in float64.

    Args:
        x: (T, K).
        codes: (N, K) int8, the values of the weight.
        scales: (N, ceil(K / group)), the scale of each output and group.
        zeros: (N, ceil(K / group)), the zero points; None: all 0.
        group: number of inputs that share a scale.
        bias: (N,), or None.
    """
    groups = torch.arange(codes.shape[1]) // group
    steps = codes.double() if zeros is None else codes.double() - zeros.double()[:, groups]
    parts = [quantize_rows(part) for part in torch.split(x, group, 1)]
    rows = torch.cat([part.double() * row_scales.double()[:, None] for part, row_scales in parts], 1)
    result = rows @ (steps * scales.double()[:, groups]).T
    return (result if bias is None else result + bias.double()).to(x.dtype)
