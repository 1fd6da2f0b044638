"""Compares steps by tokens per second: how many drafts to verify, and whether to wait for rows in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.budget import HOST_ROW_S, HOST_STEP_S, further_host_s

_SHARES = 4  # tokens of a proposal that are considered, in multiples of an equal share of all drafts
_LEAST_CONSIDERED = 8  # tokens of a proposal that are considered at least
LEAST_GAIN = 1.03  # minimum gain in tokens per second for which drafts are used: both estimates are rough


class Decoding(NamedTuple):
    """The number of decoding rows of a step, and of the tokens that it generates for them.

    Attributes:
        rows: The number of decoding rows.
        drafts: The total number of drafts that the step verifies for these rows.
        tokens: The expected number of tokens that the step generates for these rows.
    """

    rows: int
    drafts: int
    tokens: float


NO_ROWS = Decoding(0, 0, 0.0)


def host_seconds(rows: int, steps: float = 1.0) -> float:
    """Return the estimated time in seconds that the host needs to prepare a step for a GPU.

    Args:
        rows: The number of rows of the step.
        steps: The mean number of steps that the host launches together (multi-step decoding). The fixed time of a
            launch is divided among these steps.
    """
    return (HOST_STEP_S + rows * HOST_ROW_S + further_host_s(steps - 1, rows)) / steps


def is_waiting_faster(
    seconds: Callable[[int, int], float], waiting: Decoding, ready: Decoding, plain: int
) -> bool:
    """Return True if one step of all rows yields more tokens per second than two separate steps.

    The one step must wait until the newest tokens of the rows in flight are known. Of the two steps, one runs the
    `ready` rows and one the `waiting` rows.

    Args:
        seconds: Returns the device time of a step in seconds from its number of rows and its total number of drafts.
        waiting: The rows in flight: their newest tokens are not known yet.
        ready: The rows that can run now with drafts.
        plain: The number of further rows, without drafts. They are part of each step and get one token per step.
    """
    return waiting_speedup(seconds, waiting, ready, plain) > 1


def waiting_speedup(
    seconds: Callable[[int, int], float], waiting: Decoding, ready: Decoding, plain: int
) -> float:
    """Return the tokens per second of one step of all rows, divided by the tokens per second of two separate steps.

    The one step must wait until the newest tokens of the rows in flight are known. Of the two steps, one runs the
    `ready` rows and one the `waiting` rows.

    Args:
        seconds: Returns the device time of a step in seconds from its number of rows and its total number of drafts.
        waiting: The rows in flight: their newest tokens are not known yet.
        ready: The rows that can run now with drafts.
        plain: The number of further rows, without drafts. They are part of each step and get one token per step.
    """
    each = ((plain + part.rows, part.drafts) for part in (ready, waiting))
    separate_s = sum(max(seconds(n, drafts), host_seconds(n)) for n, drafts in each)
    rows, given = plain + ready.rows + waiting.rows, ready.tokens + waiting.tokens
    joint_s = seconds(rows, ready.drafts + waiting.drafts) + host_seconds(rows)
    return (plain + given) / (2 * plain + given) * separate_s / joint_s


def choose_draft_counts(
    rates: NDArray[np.float64],
    lengths: NDArray[np.int64],
    seconds: Callable[[int], float],
    certain: float,
    most: int,
    known: Mapping[int, Seq[float]] = MappingProxyType({}),
) -> NDArray[np.int64]:
    """Choose how many tokens of each proposal a step verifies, to maximise the step's tokens per second.

    The j-th token of a proposal, counted from 1, is accepted with probability rate^j. The tokens with the highest
    probabilities are verified.

    Args:
        rates: [n], the acceptance rate of the tokens of each of the n proposals.
        lengths: [n], the number of tokens per proposal.
        seconds: Returns the duration of the step in seconds from its total number of drafts.
        certain: The number of tokens that the step yields without drafts.
        most: Maximum total number of drafts.
        known: By the index of a proposal, the acceptance probability of each of its tokens, in descending order. They
            are used instead of the proposal's rate.

    Returns:
        [n], the number of leading tokens of each proposal to verify. All are 0 if drafts raise the tokens per second
        by less than 3 %.
    """
    most = min(most, int(lengths.sum()))
    if most <= 0:
        return np.zeros(len(rates), np.int64)
    longest = min(int(lengths.max()), max(_LEAST_CONSIDERED, _SHARES * most // len(rates)))
    most = min(most, int(np.minimum(lengths, longest).sum()))
    positions = np.arange(1, longest + 1)
    chances = np.where(positions <= lengths[:, None], rates[:, None] ** positions, 0.0)
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


def choose_proposal_length(
    expected: Callable[[int], float],
    rows: int,
    certain: float,
    seconds: Callable[[int], float],
    most: int,
    least: float,
) -> int:
    """Return the number of tokens that a draft model should propose per row, or 0 if it should not be queried.

    Args:
        expected: Returns the expected number of accepted tokens of a row from its number of proposed tokens.
        rows: The number of rows for which the model would be queried.
        certain: The number of tokens that the next step yields without the draft model's proposals.
        seconds: Returns the duration of the next step in seconds from the number of proposed tokens per row. It
            includes the time that the draft model takes.
        most: Maximum number of proposed tokens per row.
        least: The tokens per second without the draft model. The draft model must exceed them by 3 %.
    """
    if most <= 0:
        return 0
    best = max(range(1, most + 1), key=lambda each: (certain + rows * expected(each)) / seconds(each))
    found = (certain + rows * expected(best)) / seconds(best)
    return best if found > LEAST_GAIN * least else 0


def expected_accepted(rate: float, tokens: float) -> float:
    """Return the expected number of accepted tokens in a chain of drafts.

    Args:
        rate: The probability that a token is accepted if the tokens before it are; less than 1.
        tokens: The length of the chain.
    """
    found: float = rate * (1 - rate**tokens) / (1 - rate)
    return found


@lru_cache(1024)
def _tried(most: int) -> list[int]:
    powers = [1 << bit for bit in range(most.bit_length())]
    return sorted({min(number, most) for power in powers for number in (power, power * 3 // 2)} | {most})
