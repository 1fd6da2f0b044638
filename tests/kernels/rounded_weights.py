"""Weights rounded to the nearest quantised values, for tests and measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import GROUP, BlockWeight, block_lines
from batchinfer_kernels.fp8_matmul import FP8, quantize_rows_fp8
from batchinfer_kernels.quantized_matmul import LEAST_CODE, Int4Weight, pack_codes

GROUPS = (32, 64, 128)  # sizes of groups of inputs that `quantize_int4` supports
MAX_CODE = 7
OUTPUTS_AT_ONCE = 1024  # bounds memory: the float32 copy of a large weight would take gigabytes


def quantize_int4(weight: Tensor, group: int, symmetric: bool = True) -> Int4Weight:
    """Quantise a weight (N, K) of the activations' dtype to the nearest int4 values.

    A group with a value that is not finite has scale NaN.

    Args:
        weight: (N, K).
        group: inputs that share a scale; one of GROUPS.
        symmetric: True: the largest magnitude of a group becomes ±7. False: its range, 0 included, becomes -8 … 7.

    Raises:
        ValueError: If `weight` is not a matrix of floats, or the group size is not supported.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or group not in GROUPS:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, in groups of {group}")
    coded = [_quantized(part, group, symmetric) for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*coded, strict=True))
    packed = pack_codes((codes[:, : weight.shape[1]] - LEAST_CODE).to(torch.uint8))
    laid = [t.T.contiguous() for t in (scales, zeros)]
    return Int4Weight(packed, laid[0], None if symmetric else laid[1], weight.shape[1], group)


def _quantized(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (N, groups × group), scales and zero points (N, groups)."""
    missing = -weight.shape[1] % group
    values = torch.nn.functional.pad(weight.float(), (0, missing)).reshape(len(weight), -1, group)
    least, most = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    steps = torch.maximum(-least, most) / MAX_CODE if symmetric else (most - least) / 15
    scales = torch.where(steps.isfinite(), steps, torch.nan).to(weight.dtype)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    zeros = torch.zeros_like(least) if symmetric else (LEAST_CODE - least * inverse).nan_to_num(0).round()
    zeros = zeros.clamp(LEAST_CODE, MAX_CODE)
    codes = (values * inverse[..., None]).nan_to_num(0).round() + zeros[..., None]
    codes = codes.clamp(LEAST_CODE, MAX_CODE).to(torch.int8)
    return codes.reshape(len(weight), -1), scales, zeros.to(torch.int8)


def quantize_blocks_fp8(weight: Tensor, rows: int = GROUP) -> BlockWeight:
    """Quantise a weight (N, K) of floats with one scale per block of `rows` outputs and 128 inputs."""
    coded = [
        quantize_rows_fp8(block.reshape(1, -1))
        for part in torch.split(weight, rows)
        for block in torch.split(part, GROUP, 1)
    ]
    blocks = iter(codes.view(torch.uint8).flatten() for codes, _ in coded)
    parts = [
        torch.cat(
            [next(blocks).view(len(part), -1) for _ in range(-(-weight.shape[1] // GROUP))],
            1,
        )
        for part in torch.split(weight, rows)
    ]
    scales = torch.cat([scale for _, scale in coded]).view(len(parts), -1)
    return BlockWeight(torch.cat(parts).view(FP8), scales, block_lines(len(weight), rows, weight.device))
