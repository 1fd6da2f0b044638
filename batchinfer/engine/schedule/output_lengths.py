"""Estimates the lengths of running answers from the answers that have ended. Free of torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from batchinfer.engine.schedule.sequence import Sequence

BINS = 32  # bins per max_tokens: the resolution of an estimate
CERTAIN = 1 << 20  # fixed-point representation of probability 1
PRIOR = 2  # weight of the mean hazard in the hazard of each bin, in rows
CAUTION = 8  # a preempted row is assumed to be among the longest eighth (docs/measurements/scheduling.md)
MEMORY = 256  # ended rows that are counted: later rows may differ, because the plan sorts by length
_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: its multiples modulo 2^32 are spread evenly


class OutputLengths:
    """Estimates the final length of each running sequence from the lengths of answers that have ended.

    Each running sequence is assumed to end at a different quantile of the distribution of answer lengths. Its estimate
    is stable from step to step.
    """

    def __init__(self) -> None:
        # A Kaplan-Meier estimator (1958) of answer lengths relative to `max_tokens`, which also counts running
        # sequences. The quantiles of the sequences are spread evenly, so the estimated ends of a batch are
        # distributed like real ones.
        self._ended = [0] * BINS
        self._recent: deque[int] = deque()  # bins of the last MEMORY rows that have ended
        # Probability of ending before each bin, in units of 1 / CERTAIN; ascending
        self._dead = [0] * (BINS + 1)

    def record(self, sequence: Sequence) -> None:
        """Count the output length of a sequence that has ended. A length that was known in advance is not counted."""
        if sequence.exact:
            return
        self._recent.append(_bin(sequence))
        self._ended[self._recent[-1]] += 1
        if len(self._recent) > MEMORY:
            self._ended[self._recent.popleft()] -= 1

    def update(self, running: Iterable[Sequence]) -> None:
        """Recompute the distribution of output lengths from the newest ended sequences and the running sequences."""
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

    def expected_length(self, sequence: Sequence) -> int:
        """Return the expected final length of a running sequence in tokens, prompt included.

        A sequence that was preempted is assumed to be among the longest.
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
    # The hazard of a bin that few answers have reached is moved towards the mean hazard
    ends, exposed = sum(ended), sum(reached)
    dead, alive = [0], CERTAIN
    for count, rows in zip(ended, reached, strict=True):
        if exposed:
            top, bottom = count * exposed + PRIOR * ends, (rows + PRIOR) * exposed
            alive -= alive * top // bottom
        dead.append(CERTAIN - alive)
    return dead
