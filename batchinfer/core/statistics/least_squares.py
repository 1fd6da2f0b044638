"""Least squares with no negative coefficient, as Lawson and Hanson (1974) solve them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOLERANCE = 1e-10  # of a gradient: below it no coefficient would gain by rising


def nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """The coefficients x ≥ 0 that bring `columns` @ x nearest to `wanted`. Columns of zeros have coefficient 0."""
    number = columns.shape[1]
    found, free = np.zeros(number), np.zeros(number, bool)
    for _ in range(
        3 * number
    ):  # each round frees one; Lawson and Hanson's own bound against rounding in circles
        gradient = columns.T @ (wanted - columns @ found)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= TOLERANCE:
            break
        free[best] = True
        found = _settled(columns, wanted, found, free)
    return found


def _settled(columns: Floats, wanted: Floats, found: Floats, free: NDArray[np.bool_]) -> Floats:
    """The best of the free coefficients; those that would become negative are fixed at 0, in `free` too."""
    while True:
        best = np.zeros(len(found))
        best[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        falling = free & (best <= 0)
        if not falling.any():
            return best
        drop = found[falling] - best[falling]  # 0 for one that was freed just now and gains nothing
        share = np.divide(found[falling], drop, out=np.zeros(len(drop)), where=drop > 0).min()
        found = found + share * (best - found)
        free &= found > 1e-12
        if not free.any():
            return np.zeros(len(found))
