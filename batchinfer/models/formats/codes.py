"""Converts quantised values: unpacks words, looks up table entries and applies scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from batchinfer.models.formats.packed_tensor import Codes

# The numbers of E2M1, by the bits that encode them: the sign, two of the exponent, one of the fraction
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
WORD_BITS = 32


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack the quantised values of words.

    Args:
        words: (..., W) int32.
        bits: Bits of a value, a divisor of 8.
        order: If given, value i of a word is at position `order[i]`, counted in values from the lowest bits. By
            default, value i is at position i.

    Returns:
        (..., W * 32 / bits) uint8.
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
    """Return, for each byte, the table entries of its two 4-bit halves, lower bits first.

    Args:
        table: The numbers of the 16 possible values.

    Returns:
        (256,) int64, each the bits of two float32 numbers. A lookup of pairs is five times as fast as two lookups.
    """
    return _pairs(tuple(table))


@cache
def _pairs(table: tuple[float, ...]) -> Tensor:
    values, byte = torch.tensor(table), torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), 1).view(torch.int64).flatten()


def look_up_pairs(values: Tensor, pairs: Tensor) -> Tensor:
    """Look up the two 4-bit values of each byte.

    Args:
        values: (..., B) uint8, the first value of a byte in the lower bits.
        pairs: The table, from `byte_pairs`.

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
        values: (K, N) integers.
        scales: (G, N), a scale per group of inputs and output.
        zeros: (G, N), the zero points, or None for 0.
        groups: (K,), the group of each input, or None if the K inputs are divided into G consecutive groups of equal
            size.
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
    """Return the group of each input, (inputs,), for groups of `group` consecutive inputs. The last may be smaller."""
    return torch.arange(inputs) // group


def scale_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply values with their block's scale.

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
    """Return unsigned 4-bit values as signed ones, with their scales.

    Args:
        values: (N, K) from 0 to 15, for N outputs and K inputs. The result has these values minus 8.
        scales: (N, groups).
        zeros: (N, groups), the zero points on the scale of `values`, or None for 8.
    """
    middle = 2 ** (4 - 1)
    lowered = None if zeros is None else zeros.float() - middle
    return Codes((values.to(torch.int8) - middle).contiguous(), scales.float(), zeros=lowered)


def int4_words(codes: Tensor) -> Tensor:
    """Pack 4-bit values into words, as compressed-tensors does.

    Args:
        codes: (N, K) int8 from -8 to 7, with K a multiple of 8.

    Returns:
        (N, K / 8) int32, the first value of a word in the lowest bits.
    """
    raised = (codes + 2 ** (4 - 1)).to(torch.uint8)
    pairs: Tensor = raised[:, 0::2] | raised[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)
