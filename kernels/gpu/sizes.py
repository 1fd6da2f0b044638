"""Arithmetic of launches, in plain integers: Triton's functions of these names are made for kernels, too, and take the
host ten times as long, several times a launch."""

from __future__ import annotations


def cdiv(total: int, size: int) -> int:
    """Return how many pieces of this size hold the total."""
    return -(-total // size)


def next_power_of_2(n: int) -> int:
    """The least that is no less than n; 1 for less than 1."""
    return 1 << max(0, n - 1).bit_length()
