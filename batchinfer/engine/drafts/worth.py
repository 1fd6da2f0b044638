"""Decides which drafts are worth their time: how many of a step, and whether a step waits for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.budget import HOST_ROW_S, HOST_STEP_S, further_host_s

_SHARES = 4  # a proposal is looked at for so many times its share of all drafts that there may be
_LEAST_LOOKED_AT = 8  # tokens of it, whatever that is
# A step with drafts has to give so many times the tokens a second of one without: what is believed of either is rough
LEAST_GAIN = 1.03


class Decoding(NamedTuple):
    """Rows that decode in a step, their drafts in all, and the tokens that they are expected to get."""

    rows: int
    drafts: int
    tokens: float


NOBODY = Decoding(0, 0, 0.0)


def host_seconds(rows: int, steps: float = 1.0) -> float:
    """Return about how long a GPU's host works on a step of so many rows: while the step before runs, or, where it
    needs the tokens of that one, while the GPU waits. `steps`: how many it launches at once, in the mean."""
    return (HOST_STEP_S + rows * HOST_ROW_S + further_host_s(steps - 1, rows)) / steps


def waiting_pays(seconds: Callable[[int, int], float], behind: Decoding, now: Decoding, plain: int) -> bool:
    """Whether one step of all rows, before which the device waits, gives more tokens a second than a step of those
    that can run now and one of those that wait; see `waiting_gain`."""
    return waiting_gain(seconds, behind, now, plain) > 1


def waiting_gain(seconds: Callable[[int, int], float], behind: Decoding, now: Decoding, plain: int) -> float:
    """Return how many times as many tokens a second there are where one step of all rows waits.

    seconds: of a step of so many rows with so many drafts in all; behind: the rows that wait; now: those that can run,
    and would wait behind that; plain: further ones, which run in every step and get a token.
    """
    each = ((plain + part.rows, part.drafts) for part in (now, behind))
    apart = sum(max(seconds(n, drafts), host_seconds(n)) for n, drafts in each)
    rows, given = plain + now.rows + behind.rows, now.tokens + behind.tokens
    together = seconds(rows, now.drafts + behind.drafts) + host_seconds(rows)
    return (plain + given) / (2 * plain + given) * apart / together


def drafts_worth(
    rates: NDArray[np.float64],
    lengths: NDArray[np.int64],
    seconds: Callable[[int], float],
    certain: float,
    most: int,
    known: Mapping[int, Seq[float]] = MappingProxyType({}),
) -> NDArray[np.int64]:
    """Return how many tokens of each proposal to verify, (n,), `most` or fewer in all, so that the step gives the most
    tokens a second.

    rates: (n,), how likely each token of a proposal is to be right where those before it are; lengths: (n,), its
    tokens; seconds: of a step with so many drafts in all; certain: the tokens that the step gives anyway; known: of
    proposals, by their number, how likely each token is to be right, where that is known better: it never rises.

    A draft at place j of its proposal is right with probability rate^j, so that the likeliest drafts of all rows are
    the first ones of their proposals. Numbers of them are tried that grow by a half, and then those about the best.
    """
    most = min(most, int(lengths.sum()))
    if most <= 0:
        return np.zeros(len(rates), np.int64)
    longest = min(int(lengths.max()), max(_LEAST_LOOKED_AT, _SHARES * most // len(rates)))
    most = min(most, int(np.minimum(lengths, longest).sum()))
    places = np.arange(1, longest + 1)
    chances = np.where(places <= lengths[:, None], rates[:, None] ** places, 0.0)
    for number, own in known.items():
        first = min(longest, int(lengths[number]))
        chances[number, :first] = own[:first]
    order = np.argsort(-chances, axis=None, kind="stable")
    given = np.cumsum(chances.ravel()[order])

    def tokens_a_second(drafts: int) -> float:
        return float(certain + given[drafts - 1]) / seconds(drafts)

    best = max(tried := _tried(most), key=tokens_a_second)
    at = tried.index(best)
    low, high = (tried[at - 1] if at else 0), tried[min(at + 1, len(tried) - 1)]
    between = {low + (high - low) * part // 6 for part in range(1, 6)} - {0}
    best = max((best, *between), key=tokens_a_second)
    if tokens_a_second(best) <= LEAST_GAIN * certain / seconds(0):
        best = 0
    rows = order[:best] // longest
    return np.bincount(rows, minlength=len(rates)).astype(np.int64)


def worth_asking(
    expected: Callable[[int], float],
    rows: int,
    certain: float,
    seconds: Callable[[int], float],
    most: int,
    least: float,
) -> int:
    """Return how many tokens of each of `rows` rows, `most` or fewer, it pays to have a model propose, so that the step
    gives the most tokens a second; 0: it does not pay to ask.

    expected: how many of so many tokens of a row are to be right; certain: the tokens that the step gives anyway;
    seconds: of a step with so many tokens of each row, their proposal included; least: the tokens a second that there
    are without.
    """
    if most <= 0:
        return 0
    best = max(range(1, most + 1), key=lambda each: (certain + rows * expected(each)) / seconds(each))
    found = (certain + rows * expected(best)) / seconds(best)
    return best if found > LEAST_GAIN * least else 0


def expected_right(rate: float, tokens: float) -> float:
    """Return how many of a proposal's tokens are expected to be right."""
    found: float = rate * (1 - rate**tokens) / (1 - rate)
    return found


@lru_cache(1024)
def _tried(most: int) -> list[int]:
    """Return the numbers of drafts that are tried first: 1, 2, 3, 4, 6, 8, 12, and so on up to `most`."""
    powers = [1 << bit for bit in range(most.bit_length())]
    return sorted({min(number, most) for power in powers for number in (power, power * 3 // 2)} | {most})
