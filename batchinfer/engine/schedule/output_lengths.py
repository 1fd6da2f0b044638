"""Estimates how long answers will become, from those that have ended so far. Ints only."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from batchinfer.engine.schedule.sequence import Sequence

# Parts of max_tokens: an estimate is wrong by one of them at most, and the pass over them stays small
BINS = 32
CERTAIN = 1 << 20  # a probability of one
PRIOR = 2  # rows' worth of belief that a length not reached yet is like those before it
CAUTION = 8  # a preempted row is among the longest eighth (docs/measurements/scheduling.md)
# Rows that have ended and are remembered: later ones may be of another kind, as the plan sorts by length
MEMORY = 256
_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: multiples of it fill [0, 2^32) evenly, however many are taken


class OutputLengths:
    """Estimates the final length of each running sequence.

    `max_tokens` is an upper bound that answers rarely reach: reserving it would leave the batch half empty, and
    taking the mean would count on every answer ending at once. So the share of max_tokens at which answers end is
    estimated as survival analysis does (Kaplan and Meier, 1958): rows that still run count as having lived so long,
    without which the first, short answers would make all look short. Each row then stands for its own quantile of
    what is left of the distribution, evenly spread over any run of neighbours: together they end as a real
    batch does, and the estimate of a row does not jump from step to step.
    """

    def __init__(self) -> None:
        self._ended = [0] * BINS
        self._recent: deque[int] = deque()  # the bins of the last MEMORY rows that have ended
        self._dead = [0] * (BINS + 1)  # out of CERTAIN: those that have ended before the bin; ascending

    def record(self, sequence: Sequence) -> None:
        """Take the length of a sequence that has ended into the statistics."""
        if sequence.exact:
            return
        self._recent.append(_bin(sequence))
        self._ended[self._recent[-1]] += 1
        if len(self._recent) > MEMORY:
            self._ended[self._recent.popleft()] -= 1

    def survey(self, running: Iterable[Sequence]) -> None:
        """Recompute the distribution from the rows that have ended and those that still run."""
        alive = [0] * BINS
        for sequence in running:
            if not sequence.exact:
                alive[_bin(sequence)] += 1
        reached = [0] * BINS
        total = 0
        for at in range(BINS - 1, -1, -1):
            total += self._ended[at] + alive[at]
            reached[at] = total
        self._dead = _deaths(self._ended, reached)

    def longest(self, sequence: Sequence) -> int:
        """Expected final length in tokens, prompt included. A preempted row counts among the longest, because its
        estimate was too low once.
        """
        if sequence.exact:
            return sequence.max_length
        most, now = sequence.max_length - sequence.prompt_length, _bin(sequence)
        left = CERTAIN - self._dead[now]
        quantile = (sequence.arrival * _GOLDEN & 0xFFFFFFFF) * left >> 32
        if sequence.preemptions:
            quantile = left - (left - quantile) // CAUTION
        end = bisect_right(self._dead, self._dead[now] + quantile, now + 1, BINS)
        return max(sequence.prompt_length + -(-most * end // BINS), len(sequence) + 1)


def _bin(sequence: Sequence) -> int:
    most = sequence.max_length - sequence.prompt_length
    return min(BINS - 1, sequence.output_length * BINS // max(most, 1))


def _deaths(ended: list[int], reached: list[int]) -> list[int]:
    """Cumulated hazard at each bin. Where few rows have reached a bin, its hazard is drawn towards the mean of all."""
    ends, exposed = sum(ended), sum(reached)
    dead, alive = [0], CERTAIN
    for count, rows in zip(ended, reached, strict=True):
        if exposed:
            top, bottom = count * exposed + PRIOR * ends, (rows + PRIOR) * exposed
            alive -= alive * top // bottom
        dead.append(CERTAIN - alive)
    return dead
