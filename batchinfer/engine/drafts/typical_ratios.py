"""The typical ratio of steps' times to their roofline bounds, which a few slow steps do not change."""

from __future__ import annotations

from collections import deque
from statistics import median

FEWEST = 3  # steps: of fewer, the median is not robust against a single slow one
_NEWEST = 31  # of each size


class TypicalRatios:
    """Keeps the newest ratios for each power of two of a step's tokens, and gives the median of the nearest."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}

    def measured(self, tokens: int, ratio: float) -> None:
        """Take the ratio of a step."""
        self._newest.setdefault(tokens.bit_length(), deque(maxlen=_NEWEST)).append(ratio)

    def nearest(self, tokens: int) -> tuple[int, float] | None:
        """Return how far the steps are that are nearest in size, in powers of two, and the median of their ratios.

        None: too few steps were measured.
        """
        ratios, level = list[float](), tokens.bit_length()
        for one in sorted(self._newest, key=lambda one: (abs(one - level), one)):
            ratios += self._newest[one]
            if len(ratios) >= FEWEST:
                return abs(one - level), median(ratios)
        return None
