"""Counter-based random numbers: a draw does not depend on the batch, the order or the device."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS, _WEYL, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Compute n random numbers of 128 bits with Philox-4x32-10 (Salmon et al., SC 2011).

    Args:
        counter: (n, 4), 32-bit words in int64.
        key: (n, 2), 32-bit words in int64.

    Returns:
        (n, 4), 32-bit words in int64.
    """
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key.unbind(1)
    for _ in range(10):
        # An int64 product that overflows wraps around and keeps its low 64 bits
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (first >> 32) & _WORD, (second >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, second & _WORD, high0 ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), 1)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a uniform random number in [0, 1) for each of n rows, with 53 random bits: (n,) float64.

    Args:
        keys: (n, 4) int32, the seed of each row. The first two words are the key of `philox`, the others the upper half
            of its counter.
        positions: (n,) int32, the index of the token in its sequence. It is the lowest word of the counter; the second
            is 0.
    """
    words = keys.long() & _WORD
    lowest = positions.long() & _WORD
    counter = torch.stack((lowest, torch.zeros_like(lowest), words[:, 2], words[:, 3]), 1)
    drawn = philox(counter, words[:, :2])
    return ((drawn[:, 0] >> 5) * (1 << 26) + (drawn[:, 1] >> 6)).double() / (1 << 53)
