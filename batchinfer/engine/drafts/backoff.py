"""Limits the search for drafts: back-off per row, and a time budget."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PAUSE = 32  # tokens


@dataclass(slots=True)
class Backoff:
    """Exponential back-off for a row whose drafts were missing or rejected several times in succession."""

    failures: int = 0
    resumes: int = 0  # the row's length at which it is tried again, in tokens

    def is_over(self, length: int) -> bool:
        """Return True if a row of this length may be tried."""
        return length >= self.resumes

    def record_failure(self, length: int, most: int) -> None:
        """Count a failure. After more than `most` of them, pause for an exponentially growing number of tokens.

        Args:
            length: The row's current length in tokens.
            most: The failures that are tolerated without a pause.
        """
        self.failures += 1
        if self.failures > most:
            self.resumes = length + min(_LONGEST_PAUSE, 1 << min(self.failures - most, 10))

    def reset(self) -> None:
        """Forget all failures."""
        self.failures = self.resumes = 0


SHARE = 0.05  # budget for searching, as a share of the time that steps would take without drafts
_SAVED_STEPS = 20  # the budget accumulates over at most this number of steps
_NEWEST = 0.2  # weight of the newest search in a moving average


class SearchBudget:
    """The time that may be spent on searching drafts: a share of the steps' time, accumulated up to a limit."""

    def __init__(self) -> None:
        self._row_s = 0.0  # measured time to search one row; 0: not measured yet
        self._allowed_s = self._most_allowed_s = 0.0

    @property
    def is_spent(self) -> bool:
        """True if there is not enough time left to search one row."""
        return bool(self._row_s) and self._allowed_s < self._row_s

    def rows(self, ready: int) -> int:
        """Return how many of `ready` rows there is time to search."""
        if self._row_s <= 0:
            return ready
        most = int(max(0.0, self._allowed_s) / self._row_s)
        if not most and self._allowed_s >= self._most_allowed_s:
            most = 1  # otherwise it would never be noticed that searching has become faster
        return most

    def subtract(self, seconds: float) -> None:
        """Subtract the duration of a search from the budget."""
        self._allowed_s -= seconds

    def record_search(self, rows: int, seconds: float) -> None:
        """Update the average time to search a row."""
        each = seconds / rows
        self._row_s += _NEWEST * (each - self._row_s) if self._row_s else each

    def record_step(self, seconds: float) -> None:
        """Add a step's share to the budget.

        Args:
            seconds: The duration that the step would have had without drafts.
        """
        share = SHARE * seconds
        self._most_allowed_s = _SAVED_STEPS * share
        self._allowed_s = min(self._allowed_s + share, self._most_allowed_s)
