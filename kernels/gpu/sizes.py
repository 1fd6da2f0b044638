"""Integer arithmetic for launches.

Triton's functions of the same names also work in kernels and take the host ten times as long, several times per launch.
"""

from __future__ import annotations


def cdiv(total: int, size: int) -> int:
    """Return total / size, rounded up."""
    return -(-total // size)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n and at least 1."""
    return 1 << max(0, n - 1).bit_length()
