"""McNemar's test: whether two ways to answer the same rows are right equally often."""

from __future__ import annotations

from math import erfc, exp, lgamma, log, sqrt

# Of the exact test. Beyond, its p value and that of the corrected chi-square differ by less than 0.001
MOST_EXACT = 100_000
SIGNIFICANT = 0.05


def mcnemar(b: int, c: int) -> float:
    """Return the two-sided p value of `b` rows that only the first has right and `c` that only the second has.

    If both are right equally often, b is binomial in b + c rows with probability 1/2 (the exact test, as in Dietterich
    1998 and Agresti 2013, 11.1). Of more than MOST_EXACT rows it is taken by the chi-square with Edwards' correction
    (1948). Raises ValueError for negative counts.
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
    """Return the logarithm of a binomial coefficient."""
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
