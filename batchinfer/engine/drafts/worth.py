"""Decides how many drafts of which rows it pays to verify in a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# A step with drafts has to give so many times the tokens a second of one without: what is believed of either is rough
LEAST_GAIN = 1.03
MOST_IN_STEP = 1 << 20


def drafts_worth(
    rates: NDArray[np.float64],
    lengths: NDArray[np.int64],
    seconds: Callable[[int], float],
    certain: float,
    most: int = MOST_IN_STEP,
) -> NDArray[np.int64]:
    """Return how many tokens of each proposal to verify, (n,), `most` or fewer in all, so that the step gives the most
    tokens a second.

    rates: (n,), how likely each token of a proposal is to be right where those before it are; lengths: (n,), its
    tokens; seconds: of a step with so many drafts in all; certain: the tokens that the step gives anyway.

    A draft at place j of its proposal is right with probability rate^j, so that the likeliest drafts of all rows are
    the first ones of their proposals. Their number is tried in steps that grow with it.
    """
    longest, most = int(lengths.max(initial=0)), min(most, int(lengths.sum()))
    if most <= 0:
        return np.zeros(len(rates), np.int64)
    places = np.arange(1, longest + 1)
    chances = np.where(places <= lengths[:, None], rates[:, None] ** places, 0.0)
    order = np.argsort(-chances, axis=None, kind="stable")
    given = np.cumsum(chances.ravel()[order])
    best, best_rate = 0, LEAST_GAIN * certain / seconds(0)
    for drafts in _tried(most):
        rate = (certain + given[drafts - 1]) / seconds(drafts)
        if rate > best_rate:
            best, best_rate = drafts, rate
    rows = order[:best] // longest
    return np.bincount(rows, minlength=len(rates)).astype(np.int64)


def _tried(most: int) -> list[int]:
    """Return the numbers of drafts that are tried: each, then every second, every fourth, and so on."""
    found, number = list[int](), 1
    while number < most:
        found.append(number)
        number += max(1, 1 << max(0, number.bit_length() - 4))
    return [*found, most]
