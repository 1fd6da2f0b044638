"""McNemar's test: tests if two methods are right equally often on the same rows."""

from __future__ import annotations

from math import erfc, exp, lgamma, log, sqrt

# Maximum rows for the exact test. Above, its p-value differs from the corrected chi-square by less than 0.001
MOST_EXACT = 100_000
SIGNIFICANT = 0.05


def mcnemar(b: int, c: int) -> float:
    """Return the two-sided p-value of McNemar's test for two methods that answered the same rows.

    If b + c is at most 100,000, it is the exact binomial test. Otherwise it is the chi-square test with Edwards'
    correction (1948). Sources: Dietterich 1998; Agresti 2013, 11.1.

    Args:
        b: Number of rows that only the first method has right.
        c: Number of rows that only the second method has right.

    Raises:
        ValueError: A count is negative.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts of rows are not negative: {b}, {c}")
    rows, fewer = b + c, min(b, c)
    if b == c:
        return 1.0
    if rows > MOST_EXACT:
        return erfc((abs(b - c) - 1) / sqrt(2 * rows))
    return min(1.0, 2 * sum(exp(_log_choose(rows, k) - rows * log(2)) for k in range(fewer + 1)))


def _log_choose(n: int, k: int) -> float:
    """Return the natural logarithm of "n choose k"."""
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
