"""Estimates the output tokens of a run from the answers that have ended so far."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

FEWEST = 16  # complete answers that an estimate needs; an answer truncated at its limit does not count
AGAIN = 1.05  # the estimate is updated when the number of complete answers has grown by this factor


@dataclass(slots=True)
class _InWork:
    # The running rows of an engine. An answer gets about one token per step
    steps: int = 0
    began: list[int] = field(default_factory=list)

    def step(self, running: int) -> None:
        self.steps += 1
        self.began += [self.steps] * (running - len(self.began))

    def finished(self, tokens: int) -> None:
        # Removes the row that started about `tokens` steps ago
        if self.began:
            del self.began[min(bisect_left(self.began, self.steps - tokens), len(self.began) - 1)]


class ExpectedOutput:
    """Counts the output tokens of a run, and estimates how many it will have in total.

    Short answers end first, so a mean over finished answers would be too small. The estimate also uses the
    running answers, which will have at least their present length; see SurvivalCurve.
    """

    def __init__(self, most: int = 0) -> None:
        """Start counting the answers of a run.

        Args:
            most: An upper bound of the output tokens of the run.
        """
        self.ended = 0  # complete answers
        self._most, self._most_of_finished = most, 0
        self._generated = self._finished = 0  # tokens of all answers, and of finished ones
        self._lengths: Counter[int] = Counter()  # of complete answers
        self._truncated: Counter[int] = Counter()  # lengths of answers truncated at their limit
        self._bounds: Counter[int] = Counter()  # limits of finished answers
        self._in_work: dict[int, _InWork] = {}  # by engine
        # The estimated ratio of answers to their limits, and the complete answers at that time
        self._share, self._seen = 1.0, 0

    def more(self, most: int) -> None:
        """Add `most` to the upper bound of the run's output tokens, for requests that became known later."""
        self._most += most

    def expect(self, most: int) -> None:
        """Replace the upper bound of the run's output tokens by `most`."""
        self._most = most

    def step(self, tokens: int, running: int, engine: int) -> None:
        """Count the output tokens of an engine step.

        Args:
            tokens: The output tokens of the step.
            running: The number of running rows of the engine.
            engine: The number of the engine.
        """
        self._generated += tokens
        self._in_work.setdefault(engine, _InWork()).step(running)

    def finished(self, most: int, tokens: int, truncated: bool, engine: int) -> None:
        """Count a finished answer.

        Args:
            most: Maximum tokens that the answer could have.
            tokens: The tokens that it has.
            truncated: True if it ended at the maximum.
            engine: The number of the engine.
        """
        if engine in self._in_work:
            self._in_work[engine].finished(tokens)
        (self._truncated if truncated else self._lengths)[tokens] += 1
        self._bounds[most] += 1
        self.ended += not truncated
        self._finished += tokens
        self._most_of_finished += most

    @property
    def is_estimate(self) -> bool:
        """Return True if enough answers are complete to estimate the run's output tokens."""
        return self.ended >= FEWEST

    @property
    def total(self) -> int:
        """Return the estimated output tokens of the run, or their upper bound if too few answers are complete."""
        left = self._most - self._most_of_finished
        if self.is_estimate and self.ended >= AGAIN * self._seen:
            self._share, self._seen = self._estimate(), self.ended
        return self._finished + round(left * self._share)

    def _estimate(self) -> float:
        from batchinfer.core.statistics.survival import (
            estimate_survival,  # imported late, because NumPy delays the first line of a run
        )

        survival = estimate_survival(self._lengths, self._truncated + self._unfinished())
        if survival is None:
            return 1.0
        most = sum(bound * times for bound, times in self._bounds.items())
        return sum(survival.mean(bound) * times for bound, times in self._bounds.items()) / max(1, most)

    def _unfinished(self) -> Counter[int]:
        # The lengths are estimated from the steps since each row started, and scaled to their known sum
        ages = [one.steps - began for one in self._in_work.values() for began in one.began]
        times = max(0, self._generated - self._finished) / max(1, sum(ages))
        return Counter(round(age * times) for age in ages)
