"""How many output tokens a run comes to, guessed from the answers that have ended so far."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

FEWEST = 16  # answers that ended by themselves: fewer say too little
AGAIN = 1.05  # the guess is made again when this many times as many answers have ended


@dataclass(slots=True)
class _InWork:
    """When the rows that one engine has in work began, in steps: an answer gets about a token a step."""

    steps: int = 0
    began: list[int] = field(default_factory=list)  # ascending

    def step(self, running: int) -> None:
        self.steps += 1
        self.began += [self.steps] * (running - len(self.began))

    def finished(self, tokens: int) -> None:
        """Remove a row whose answer has that many tokens: one that began about that many steps ago."""
        if self.began:
            del self.began[min(bisect_left(self.began, self.steps - tokens), len(self.began) - 1)]


class ExpectedOutput:
    """Counts a run's answers, and estimates what they come to.

    The first answers to end are the short ones. The guess therefore counts those that still run, too, as at least as
    long as they are by now; see Survival.
    """

    def __init__(self, most: int = 0) -> None:
        """`most`: tokens of all answers, at most."""
        self.ended = 0  # answers that ended by themselves
        self._most, self._most_of_finished = most, 0
        self._said = self._finished = 0  # tokens of all answers, and of those that have finished
        self._lengths: Counter[int] = Counter()  # of the answers that ended by themselves
        self._cut: Counter[int] = Counter()
        self._bounds: Counter[int] = Counter()  # the most tokens of each answer that has finished
        self._in_work: dict[int, _InWork] = {}  # of each engine
        # What answers have of their most; how many had ended when that was guessed
        self._share, self._seen = 1.0, 0

    def more(self, most: int) -> None:
        """Expect further answers, of so many tokens at most."""
        self._most += most

    def expect(self, most: int) -> None:
        """Expect answers of so many tokens in all, at most."""
        self._most = most

    def step(self, tokens: int, running: int, engine: int) -> None:
        """Count tokens that an engine gave to answers, while it had `running` rows in work."""
        self._said += tokens
        self._in_work.setdefault(engine, _InWork()).step(running)

    def finished(self, most: int, tokens: int, cut: bool, engine: int) -> None:
        """An engine has finished an answer that may have had `most` tokens."""
        if engine in self._in_work:
            self._in_work[engine].finished(tokens)
        (self._cut if cut else self._lengths)[tokens] += 1
        self._bounds[most] += 1
        self.ended += not cut
        self._finished += tokens
        self._most_of_finished += most

    @property
    def is_guess(self) -> bool:
        """Whether enough answers have ended to guess from."""
        return self.ended >= FEWEST

    @property
    def total(self) -> int:
        """Tokens of all answers; at most, as long as too few have ended."""
        left = self._most - self._most_of_finished
        if self.is_guess and self.ended >= AGAIN * self._seen:
            self._share, self._seen = self._guessed(), self.ended
        return self._finished + round(left * self._share)

    def _guessed(self) -> float:
        from batchinfer.core.statistics.survival import (
            survival_of,  # not before a run's first line: it needs NumPy
        )

        survival = survival_of(self._lengths, self._cut + self._unfinished())
        if survival is None:
            return 1.0
        most = sum(bound * times for bound, times in self._bounds.items())
        return sum(survival.mean(bound) * times for bound, times in self._bounds.items()) / max(1, most)

    def _unfinished(self) -> Counter[int]:
        """The tokens that answers in work have by now, as far as steps tell; their sum is known."""
        ages = [one.steps - began for one in self._in_work.values() for began in one.began]
        times = max(0, self._said - self._finished) / max(1, sum(ages))
        return Counter(round(age * times) for age in ages)
