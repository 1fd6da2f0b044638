"""Weights of 4 and 8 bits as float32, in which their products with the scales are exact or rounded once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from batchinfer.models.packed import PackedTensor

# Of E2M1, by its bits: sign, two of the exponent, one of the fraction
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127  # of a scale of MXFP4, which is a power of two


@cache
def _pairs() -> Tensor:
    """The two values of each byte, the one in its lower bits first: (256, 2)."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    byte = torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), 1)


def dequantized(packed: PackedTensor, values: Tensor, scales: Tensor) -> Tensor:
    """What they stand for: of one matrix, or of all that the tensors hold."""
    if packed.format == "mxfp4":
        return _from_mxfp4(values, scales)
    return _from_fp8(values, scales, packed.block)


def _from_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """(…, outputs, groups, bytes) → (…, inputs, outputs)."""
    wide = _pairs()[values.int()].flatten(-2)
    torch.ldexp(wide, (scales.int() - _EXPONENT_BIAS)[..., None], out=wide)
    return wide.flatten(-2).transpose(-1, -2)


def _from_fp8(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    wide, scales = values.float(), scales.float()
    if block is None:
        return wide.mul_(scales.reshape(()))
    rows, columns = block
    if rows == 1:
        return wide.mul_(scales.view(-1, 1))
    for start, of_columns in zip(range(0, len(wide), rows), scales, strict=True):
        wide[start : start + rows] *= of_columns.repeat_interleave(columns)[: wide.shape[1]]
    return wide
