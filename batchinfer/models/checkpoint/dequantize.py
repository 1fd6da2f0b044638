"""Weights of 4 and 8 bits as float32, in which their products with the scales are exact or rounded once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from batchinfer.models.checkpoint.packed import PackedTensor

# Of E2M1, by its bits: sign, two of the exponent, one of the fraction
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127  # of a scale of MXFP4, which is a power of two


@cache
def _pairs() -> Tensor:
    """The two values of each byte, the one in its lower bits first, as one number of 8 bytes, which is looked up five
    times as fast as two of 4: (256,)."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    byte = torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), 1).view(torch.int64).flatten()


def dequantized(packed: PackedTensor, values: Tensor, scales: Tensor) -> Tensor:
    """Return the dequantised values of one matrix, or of all matrices that the tensors hold."""
    if packed.format == "mxfp4":
        return _from_mxfp4(values, scales)
    return _from_fp8(values, scales, packed.block)


def _from_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """(…, outputs, groups, bytes) → (…, inputs, outputs)."""
    pairs = _pairs().index_select(0, values.flatten().int())
    wide = pairs.view(torch.float32).view(*scales.shape, -1)
    wide.mul_(torch.pow(2.0, scales.int() - _EXPONENT_BIAS)[..., None])
    return wide.flatten(-2).transpose(-1, -2)


def _from_fp8(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    wide, scales = values.float(), scales.float()
    if block is None:
        return wide.mul_(scales.reshape(()))
    rows, columns = wide.shape
    high, broad = block
    missing = (0, -columns % broad, 0, -rows % high)  # of the last blocks
    whole = pad(wide, missing) if any(missing) else wide
    blocks = whole.view(whole.shape[0] // high, high, -1, broad)
    blocks.mul_(scales.view(len(blocks), 1, -1, 1))
    return whole[:rows, :columns]
