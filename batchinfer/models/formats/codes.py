"""Quantised values as float32 numbers: unpacked from words, looked up in tables, multiplied with scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from batchinfer.models.formats.packed_tensor import Codes

# Of E2M1, by its bits: sign, two of the exponent, one of the fraction
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
WORD_BITS = 32


def unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """words: (…, W) int32 → (…, W × 32 / bits) uint8, the values in the lowest bits first, or value i of a word in the
    bits number `order[i]`. `bits` divides 8."""
    values = words.contiguous().view(torch.uint8)
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((values[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    if order is None:
        return values
    held = values.view(*values.shape[:-1], -1, WORD_BITS // bits)
    return held[..., list(order)].flatten(-2)


def pairs_of(table: Sequence[float]) -> Tensor:
    """Return the two values of each byte, the one in its lower bits first, as one number of 8 bytes, which is looked up
    five times as fast as two of 4: (256,)."""
    return _pairs(tuple(table))


@cache
def _pairs(table: tuple[float, ...]) -> Tensor:
    values, byte = torch.tensor(table), torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), 1).view(torch.int64).flatten()


def looked_up(values: Tensor, pairs: Tensor) -> Tensor:
    """values: (…, B) uint8, two values a byte → (…, 2 × B) float32; `pairs`: of `pairs_of`."""
    found = pairs.index_select(0, values.flatten().int()).view(torch.float32)
    return found.view(*values.shape[:-1], 2 * values.shape[-1])


def scaled(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None
) -> Tensor:
    """Return (values - zeros) × scales, where inputs of a group share a scale and a zero for each output.

    values: (K, N) integers; scales, zeros: (G, N); groups: (K,) the group of each input, or None where the inputs
    are cut into groups of equal size. Returns (K, N) float32.
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


def in_order(inputs: int, group: int) -> Tensor:
    """Return the group of each input, (K,), where each `group` neighbours are one and the last one may be short."""
    return torch.arange(inputs) // group


def blockwise(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """values: (n,) float32, each `block` of which is multiplied with its scale, (blocks,) → (n,)."""
    whole = len(values) // block
    head = values[: whole * block].view(whole, block) * scales[:whole, None].float()
    if whole == len(scales):
        return head.flatten()
    return torch.cat((head.flatten(), values[whole * block :] * scales[whole].float()))


def int4_codes(values: Tensor, scales: Tensor, zeros: Tensor | None) -> Codes:
    """values: (N, K) in 0 … 15; scales, zeros: (N, groups); without zeros 8 is taken off."""
    middle = 2 ** (4 - 1)
    lowered = None if zeros is None else zeros.float() - middle
    return Codes((values.to(torch.int8) - middle).contiguous(), scales.float(), zeros=lowered)


def int4_words(codes: Tensor) -> Tensor:
    """codes: (N, K) int8 in -8 … 7, K a multiple of 8 → (N, K / 8) int32, as compressed-tensors packs them."""
    raised = (codes + 2 ** (4 - 1)).to(torch.uint8)
    pairs: Tensor = raised[:, 0::2] | raised[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)
