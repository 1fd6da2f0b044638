"""Splits the quantised blocks of ggml's types into integer values, scales and offsets.

Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# The values of the indices of IQ4, and twice the values of the indices of MXFP4
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_HALF_BIAS = 128  # the bias of an exponent, plus one because _E2M1 is doubled


class BlockGroups(NamedTuple):
    """The contents of n quantised blocks of a GGUF file. Dequantised values are codes * scales - offsets.

    Attributes:
        codes: (n, groups, values per group), the quantised integers.
        scales: (n, groups) float32. Products of codes and scales are exact.
        offsets: (n, groups) float32. None: they are 0.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def values(self) -> Tensor:
        """Return the dequantised values, (n, values per block) float32."""
        found = self.codes.float().mul_(self.scales[..., None])
        if self.offsets is not None:
            found -= self.offsets[..., None]
        return found.flatten(1)


def split_blocks(blocks: Tensor, kind: str) -> BlockGroups:
    """Split the bytes of quantised blocks into integer values, scales and offsets.

    Args:
        blocks: (n, bytes per block) uint8.
        kind: The name of the ggml type, such as "Q4_K".
    """
    return _TYPES[kind](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifted(data: Tensor, width: int, *shifts: int) -> Tensor:
    by = torch.tensor(shifts, dtype=torch.uint8)[None, None, :, None]
    return data.reshape(len(data), -1, 1, width) >> by


def _nibbles(data: Tensor, width: int) -> Tensor:
    return _shifted(data, width, 0, 4) & 15


def _bits(data: Tensor) -> Tensor:
    by = torch.arange(8, dtype=torch.uint8)
    return ((data[:, :, None] >> by) & 1).view(len(data), 1, 32)


def _q4_0(blocks: Tensor) -> BlockGroups:
    codes = _nibbles(blocks[:, 2:], 16).view(-1, 1, 32).to(torch.int8)
    return BlockGroups(codes - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockGroups:
    return BlockGroups(_nibbles(blocks[:, 4:], 16).view(-1, 1, 32), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockGroups:
    codes = _nibbles(blocks[:, 6:], 16).view(-1, 1, 32) | _bits(blocks[:, 2:6]) << 4
    return BlockGroups(codes.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockGroups:
    codes = _nibbles(blocks[:, 8:], 16).view(-1, 1, 32) | _bits(blocks[:, 4:8]) << 4
    return BlockGroups(codes, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockGroups:
    return BlockGroups(blocks[:, 2:].view(torch.int8)[:, None], _half(blocks, 0))


def _q2_k(blocks: Tensor) -> BlockGroups:
    scales = blocks[:, :16]
    codes = (_shifted(blocks[:, 16:80], 32, 0, 2, 4, 6) & 3).view(-1, 16, 16)
    return BlockGroups(codes, _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> BlockGroups:
    low = _nibbles(blocks[:, 96:104], 8).view(-1, 16)
    high = (_shifted(blocks[:, 104:108], 4, 0, 2, 4, 6) & 3).view(-1, 16)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = (_shifted(blocks[:, 32:96], 32, 0, 2, 4, 6) & 3).view(-1, 16, 16)
    mask = (_shifted(blocks[:, :32], 32, *range(8)) & 1).view(-1, 16, 16)
    return BlockGroups((codes | mask << 2).to(torch.int8) - 4, _half(blocks, 108) * scales)


def _six_bits(encoded: Tensor) -> tuple[Tensor, Tensor]:
    # The first four scales and minima are in the lower bits of the first eight bytes; upper bits complete the others
    first, second, third = encoded[:, :4], encoded[:, 4:8], encoded[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)


def _q4_k(blocks: Tensor) -> BlockGroups:
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:], 32).view(-1, 8, 32)
    return BlockGroups(codes, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: Tensor) -> BlockGroups:
    scales, minima = _six_bits(blocks[:, 4:16])
    high = (_shifted(blocks[:, 16:48], 32, *range(8)) & 1).view(-1, 8, 32)
    codes = _nibbles(blocks[:, 48:], 32).view(-1, 8, 32) | high << 4
    return BlockGroups(codes, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> BlockGroups:
    low = _nibbles(blocks[:, :128], 64).view(-1, 16, 16)
    high = (_shifted(blocks[:, 128:192], 32, 0, 2, 4, 6) & 3).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return BlockGroups((low | high << 4).to(torch.int8) - 32, _half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> BlockGroups:
    return BlockGroups(_looked_up(blocks[:, 2:]).view(-1, 1, 32), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> BlockGroups:
    upper = blocks[:, 2:4].contiguous().view(torch.int16).int()
    high = (upper >> torch.arange(0, 16, 2)) & 3
    low = _shifted(blocks[:, 4:8], 1, 0, 4).view(-1, 8) & 15
    scales = (low.int() | high << 4) - 32
    return BlockGroups(_looked_up(blocks[:, 8:]).view(-1, 8, 32), _half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> BlockGroups:
    scales = torch.pow(2.0, blocks[:, :1].int() - _HALF_BIAS)
    return BlockGroups(_looked_up(blocks[:, 1:], _E2M1).view(-1, 1, 32), scales)


def _looked_up(data: Tensor, values: tuple[int, ...] = _IQ4) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[_nibbles(data, 16).int()]


_TYPES: Mapping[str, Callable[[Tensor], BlockGroups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
