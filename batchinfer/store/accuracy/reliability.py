"""Compares the probabilities of answers with how often the answers are right."""

from __future__ import annotations

from dataclasses import dataclass, field

BINS = 10  # bins of equal width from 0 to 1


@dataclass(slots=True)
class Bin:
    """Counts of answers whose probability is in one range of width 0.1.

    Attributes:
        rows: Number of answers.
        right: Number of right answers.
        probability: Sum of the probabilities of the answers.
    """

    rows: int = 0
    right: int = 0
    probability: float = 0.0


@dataclass(slots=True)
class Reliability:
    """A calibration table: counts answers, and right answers, by the probability of the answer.

    Memory does not grow with the number of rows. Source: Guo et al., On Calibration of Modern Neural
    Networks, 2017, https://arxiv.org/abs/1706.04599.

    Attributes:
        bins: Ten bins of equal width from 0 to 1.
    """

    bins: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(BINS)])
    _squares: float = 0.0  # sum of squared differences between probability and 1 (right) or 0 (wrong)

    def add(self, probability: float, right: bool) -> None:
        """Count an answer, given its probability from 0 to 1, and True if it is right."""
        one = self.bins[min(BINS - 1, int(probability * BINS))]
        one.rows += 1
        one.right += right
        one.probability += probability
        self._squares += (probability - right) ** 2

    @property
    def rows(self) -> int:
        """Return the number of counted answers."""
        return sum(one.rows for one in self.bins)

    @property
    def mean_probability(self) -> float | None:
        """Return the mean probability of the answers, or None without answers."""
        rows = self.rows
        return sum(one.probability for one in self.bins) / rows if rows else None

    @property
    def expected_error(self) -> float | None:
        """Return the expected calibration error of the answers, from 0 to 1, or None without answers.

        It is the mean of |mean probability - share of right answers| over the bins, weighted by their numbers
        of answers.
        """
        rows = self.rows
        return sum(abs(one.probability - one.right) for one in self.bins) / rows if rows else None

    @property
    def brier_score(self) -> float | None:
        """Return the Brier score of the answers, from 0 to 1, or None without answers.

        It is the mean of (probability - right)², where `right` is 1 for a right answer and 0 for a wrong one.
        """
        rows = self.rows
        return self._squares / rows if rows else None
