"""Decides whether a GPU's next step waits for the tokens of the one in flight, so that it has the rows that they are
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from batchinfer.engine.schedule.budget import HOST_ROW_S, HOST_STEP_S, further_host_s


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
