"""Converts quantised values: unpacks words, looks up table entries and applies scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from batchinfer.models.formats.encoded_tensor import Codes

# The numbers of E2M1, by the bits that encode them: the sign, two of the exponent, one of the fraction
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
WORD_BITS = 32


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack quantised values of 2, 4 or 8 bits from 32-bit words.

    Args:
        words: (..., W) int32.
        bits: Bits of a value.
        order: Value i of a word is at position `order[i]`, counted in values from the lowest bits. None: at position i.

    Returns:
        (..., W * 32 / bits) uint8, the values of all words in order.
    """
    values = words.contiguous().view(torch.uint8)
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((values[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    if order is None:
        return values
    held = values.view(*values.shape[:-1], -1, WORD_BITS // bits)
    return held[..., list(order)].flatten(-2)


def byte_pairs(table: Sequence[float]) -> Tensor:
    """Return a table that maps a byte to the two floats of its 4-bit halves. The lower half comes first.

    A lookup of pairs is five times as fast as two lookups.

    Args:
        table: The floats of the 16 possible 4-bit values.

    Returns:
        (256,) int64. Each element has the bits of two float32 numbers.
    """
    return _pairs(tuple(table))


@cache
def _pairs(table: tuple[float, ...]) -> Tensor:
    values, byte = torch.tensor(table), torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), 1).view(torch.int64).flatten()


def look_up_pairs(values: Tensor, pairs: Tensor) -> Tensor:
    """Look up the floats of the two 4-bit values in each byte.

    Args:
        values: (..., B) uint8, the first value of a byte in the lower bits.
        pairs: The table from `byte_pairs`.

    Returns:
        (..., 2 * B) float32.
    """
    found = pairs.index_select(0, values.flatten().int()).view(torch.float32)
    return found.view(*values.shape[:-1], 2 * values.shape[-1])


def apply_scales(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None
) -> Tensor:
    """Return (values - zeros) * scales as float32 (K, N), with K inputs and N outputs.

    Args:
        values: (K, N), quantised integers.
        scales: (G, N), a scale per group of inputs and per output.
        zeros: (G, N), the zero points. None: they are 0.
        groups: (K,), the number of each input's group. None: the K inputs form G consecutive groups of equal size.
    """
    inputs, outputs = values.shape
    wide, scales = values.float(), scales.float()
    if groups is None:
        wide = wide.view(len(scales), inputs // len(scales), outputs)
        spread, offsets = scales[:, None], None if zeros is None else zeros.float()[:, None]
    else:
        places = groups.long()
        spread, offsets = scales[places], None if zeros is None else zeros.float()[places]
    if offsets is not None:
        wide -= offsets
    wide *= spread
    return wide.reshape(inputs, outputs)


def consecutive_groups(inputs: int, group: int) -> Tensor:
    """Return the number of each input's group, (inputs,), for groups of `group` consecutive inputs.

    The last group may be smaller.
    """
    return torch.arange(inputs) // group


def scale_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each value by the scale of its block.

    Args:
        values: (n,) float32.
        scales: (blocks,).
        block: Number of consecutive values that share a scale. The last block may be shorter.

    Returns:
        (n,) float32.
    """
    whole = len(values) // block
    head = values[: whole * block].view(whole, block) * scales[:whole, None].float()
    if whole == len(scales):
        return head.flatten()
    return torch.cat((head.flatten(), values[whole * block :] * scales[whole].float()))


def int4_codes(values: Tensor, scales: Tensor, zeros: Tensor | None) -> Codes:
    """Return unsigned 4-bit values as signed ones, as operators expect them, with their scales and zero points.

    Args:
        values: (N, K) from 0 to 15, for N outputs and K inputs. The result has these values minus 8.
        scales: (N, groups).
        zeros: (N, groups), the zero points, in the range of `values`. None: they are 8.
    """
    middle = 2 ** (4 - 1)
    lowered = None if zeros is None else zeros.float() - middle
    return Codes((values.to(torch.int8) - middle).contiguous(), scales.float(), zeros=lowered)


def int4_words(codes: Tensor) -> Tensor:
    """Pack signed 4-bit values into 32-bit words in compressed-tensors' layout, as unsigned values.

    Args:
        codes: (N, K) int8 from -8 to 7, with K a multiple of 8.

    Returns:
        (N, K / 8) int32, the first value of a word in the lowest bits.
    """
    raised = (codes + 2 ** (4 - 1)).to(torch.uint8)
    pairs: Tensor = raised[:, 0::2] | raised[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)
