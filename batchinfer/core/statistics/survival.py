"""Estimates the lengths of answers from a sample that includes answers truncated by a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """The share of answers that are longer than n tokens, for each n, estimated from a sample of answers.

    Answers that were truncated or are still running count as longer than their current length (Kaplan and Meier, 1958).
    The estimate is extrapolated beyond the longest answer of the sample (Brown, Hollander and Kotz, 1974).

    Args:
        _lengths: The lengths in tokens at which answers ended, ascending.
        _longer: For each of these lengths, the share of answers that are longer.
        _last: The number of tokens of the longest answer, truncated or not.
    """

    # Beyond the longest answer, the share decreases exponentially, at the mean rate up to there
    _lengths: Ints
    _longer: Floats
    _last: int

    @classmethod
    def of(cls, lengths: Ints, truncated: NDArray[np.bool_]) -> SurvivalCurve | None:
        """Estimate the curve from a sample of answers. Return None if every answer was truncated.

        Args:
            lengths: (n,), number of tokens of each answer.
            truncated: (n,), True if the answer was truncated or still runs.
        """
        return cls.of_counts(
            *np.unique(lengths[~truncated], return_counts=True),
            *np.unique(lengths[truncated], return_counts=True),
        )

    @classmethod
    def of_counts(
        cls, ended: Ints, times: Ints, truncated: Ints, truncated_times: Ints
    ) -> SurvivalCurve | None:
        """Estimate the curve from counts of answers by length. Return None if every answer was truncated.

        Args:
            ended: The different lengths of answers that were not truncated, ascending.
            times: The number of answers that ended, for each length in `ended`.
            truncated: The different lengths of truncated answers, ascending.
            truncated_times: The number of truncated answers, for each length in `truncated`.
        """
        if not len(ended):
            return None
        # Answers truncated at a length count as at risk there: they are longer
        reached = times[::-1].cumsum()[::-1] + _at_least(ended, truncated, truncated_times)
        longer = np.cumprod(1 - times / reached, dtype=np.float64)
        return cls(ended, longer, int(max(ended[-1], truncated[-1] if len(truncated) else 0)))

    def length(self, share: float, most: int) -> int:
        """Return the number of tokens that a given share of the answers does not exceed.

        Args:
            share: The share of the answers, 0 to 1.
            most: The maximum of the result.
        """
        left = 1 - share
        at = int(np.searchsorted(-self._longer, -left))
        if at < len(self._lengths):
            return min(most, int(self._lengths[at]))
        rate = -math.log(float(self._longer[-1])) / self._last
        return min(most, max(self._last + 1, math.ceil(-math.log(left) / rate))) if left else most

    def mean(self, most: int) -> float:
        """Return the mean length in tokens of answers that are truncated at `most` tokens."""
        observed = min(most, self._last)
        ends = np.concatenate([[0], self._lengths[self._lengths < observed], [observed]])
        longer = np.concatenate([[1.0], self._longer[: len(ends) - 2]])
        seen = float(np.diff(ends) @ longer)
        last = float(self._longer[-1])
        if most <= self._last or last <= 0:
            return seen
        rate = -math.log(last) / self._last
        return seen + (last - math.exp(-rate * most)) / rate


def _at_least(lengths: Ints, truncated: Ints, times: Ints) -> Ints:
    sums = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
    found: Ints = sums[-1] - sums[np.searchsorted(truncated, lengths)]
    return found


def estimate_survival(ended: Mapping[int, int], truncated: Mapping[int, int]) -> SurvivalCurve | None:
    """Estimate the share of answers that are longer than n tokens. Return None if every answer was truncated.

    Args:
        ended: The number of complete answers, by their length in tokens.
        truncated: The number of truncated answers, by their length in tokens.
    """
    return SurvivalCurve.of_counts(*_ascending(ended), *_ascending(truncated))


def _ascending(counts: Mapping[int, int]) -> tuple[Ints, Ints]:
    lengths = np.array(sorted(counts), np.int64)
    return lengths, np.array([counts[length] for length in lengths.tolist()], np.int64)
