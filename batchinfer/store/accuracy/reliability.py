"""Whether answers are right as often as their probabilities say."""

from __future__ import annotations

from dataclasses import dataclass, field

BINS = 10  # of equal width, from 0 to 1


@dataclass(slots=True)
class Bin:
    """Rows whose answers have a probability within a tenth."""

    rows: int = 0
    right: int = 0
    probability: float = 0.0  # the sum of their probabilities


@dataclass(slots=True)
class Reliability:
    """Counts answers by their probability, and how many of them are right.

    What it holds does not grow with the rows. Source: Guo et al., On Calibration of Modern Neural Networks, 2017,
    https://arxiv.org/abs/1706.04599.
    """

    bins: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(BINS)])
    _squares: float = 0.0  # the sum of squared distances between probability, and 1 for a right answer or 0

    def add(self, probability: float, right: bool) -> None:
        """Count an answer with this probability, from 0 to 1."""
        one = self.bins[min(BINS - 1, int(probability * BINS))]
        one.rows += 1
        one.right += right
        one.probability += probability
        self._squares += (probability - right) ** 2

    @property
    def rows(self) -> int:
        """How many answers have a probability."""
        return sum(one.rows for one in self.bins)

    @property
    def mean_probability(self) -> float | None:
        """The mean probability of the answers; None: there are none."""
        rows = self.rows
        return sum(one.probability for one in self.bins) / rows if rows else None

    @property
    def expected_error(self) -> float | None:
        """The expected calibration error: the mean over all answers of the distance, within their bin, between the mean
        probability and the share of right answers; None: there are no answers."""
        rows = self.rows
        return sum(abs(one.probability - one.right) for one in self.bins) / rows if rows else None

    @property
    def brier_score(self) -> float | None:
        """The mean squared distance between an answer's probability, and 1 where it is right or 0; None: there are no
        answers."""
        rows = self.rows
        return self._squares / rows if rows else None
