"""How long answers become, estimated from answers of which some were cut before they had ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """Return the share of answers longer than a number of tokens: the estimate of Kaplan and Meier (1958).

    An answer that `max_tokens` cut, or that still runs, is known to be longer than what there is of it, and no more: to
    take its tokens for its length would make answers look short. Beyond the longest answer that was seen, where only
    cut ones are left, the share falls exponentially, at the mean rate until there (Brown, Hollander and Kotz, 1974).
    """

    _lengths: Ints  # ascending, those at which answers ended
    _longer: Floats  # the share that is longer than each
    _last: int  # tokens of the longest answer, cut or not

    @classmethod
    def of(cls, lengths: Ints, cut: NDArray[np.bool_]) -> Survival | None:
        """From answers' tokens, and whether each was cut; None where none of them ended by itself."""
        return cls.of_counts(
            *np.unique(lengths[~cut], return_counts=True), *np.unique(lengths[cut], return_counts=True)
        )

    @classmethod
    def of_counts(cls, ended: Ints, times: Ints, cut: Ints, cut_times: Ints) -> Survival | None:
        """From the lengths at which answers ended and were cut, both ascending, and how many answers had each."""
        if not len(ended):
            return None
        # those that were cut at a length go on beyond it
        reached = times[::-1].cumsum()[::-1] + _at_least(ended, cut, cut_times)
        longer = np.cumprod(1 - times / reached, dtype=np.float64)
        return cls(ended, longer, int(max(ended[-1], cut[-1] if len(cut) else 0)))

    def length(self, share: float, most: int) -> int:
        """Tokens that such a share (0 … 1) of all answers does not exceed, where none may have more than `most`."""
        left = 1 - share
        at = int(np.searchsorted(-self._longer, -left))
        if at < len(self._lengths):
            return min(most, int(self._lengths[at]))
        rate = -math.log(float(self._longer[-1])) / self._last
        return min(most, max(self._last + 1, math.ceil(-math.log(left) / rate))) if left else most

    def mean(self, most: int) -> float:
        """Tokens of an answer that may have `most`, on average."""
        known = min(most, self._last)
        ends = np.concatenate([[0], self._lengths[self._lengths < known], [known]])
        longer = np.concatenate([[1.0], self._longer[: len(ends) - 2]])
        seen = float(np.diff(ends) @ longer)
        last = float(self._longer[-1])
        if most <= self._last or last <= 0:
            return seen
        rate = -math.log(last) / self._last
        return seen + (last - math.exp(-rate * most)) / rate


def _at_least(lengths: Ints, cut: Ints, times: Ints) -> Ints:
    """How many answers were cut at each of these lengths or later."""
    sums = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
    found: Ints = sums[-1] - sums[np.searchsorted(cut, lengths)]
    return found


def survival_of(ended: Mapping[int, int], cut: Mapping[int, int]) -> Survival | None:
    """Estimate from how many answers have each number of tokens: answers that ended by themselves, and cut ones."""
    return Survival.of_counts(*_ascending(ended), *_ascending(cut))


def _ascending(counts: Mapping[int, int]) -> tuple[Ints, Ints]:
    lengths = np.array(sorted(counts), np.int64)
    return lengths, np.array([counts[length] for length in lengths.tolist()], np.int64)
