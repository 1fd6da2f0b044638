"""Non-negative least squares by the algorithm of Lawson and Hanson (1974)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOLERANCE = 1e-10  # gradients below this count as zero


def nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Return the coefficients x ≥ 0, (n,), that minimise |columns @ x - wanted|.

    Args:
        columns: (m, n). A column of zeros gets the coefficient 0.
        wanted: (m,), the values to approximate.
    """
    number = columns.shape[1]
    found, free = np.zeros(number), np.zeros(number, bool)
    # Each round frees a coefficient. Lawson and Hanson limit the rounds, as rounding errors could cause a cycle
    for _ in range(3 * number):
        gradient = columns.T @ (wanted - columns @ found)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= TOLERANCE:
            break
        free[best] = True
        found = _solve_free(columns, wanted, found, free)
    return found


def _solve_free(columns: Floats, wanted: Floats, found: Floats, free: NDArray[np.bool_]) -> Floats:
    while True:
        best = np.zeros(len(found))
        best[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        falling = free & (best <= 0)
        if not falling.any():
            return best
        drop = found[falling] - best[falling]  # 0 if a coefficient was just freed and does not change
        share = np.divide(found[falling], drop, out=np.zeros(len(drop)), where=drop > 0).min()
        found = found + share * (best - found)
        free &= found > 1e-12
        if not free.any():
            return np.zeros(len(found))
