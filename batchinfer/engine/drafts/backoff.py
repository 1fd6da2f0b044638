"""Limits the search for drafts: back-off per row, and a time budget."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PAUSE = 32  # tokens


@dataclass(slots=True)
class Backoff:
    """Exponential back-off for a row: it gets no drafts for some tokens after several failures in succession.

    A failure is a query of a draft source without an accepted draft: the draft was missing or rejected.

    Attributes:
        failures: The number of failures since the last accepted draft.
        resumes: The row's length in tokens, prompt included, from which drafts are tried again.
    """

    failures: int = 0
    resumes: int = 0

    def is_over(self, length: int) -> bool:
        """Return True if the row's back-off is over, so draft sources may be queried for it again.

        Args:
            length: The row's current length in tokens.
        """
        return length >= self.resumes

    def record_failure(self, length: int, most: int) -> None:
        """Count a failure: a query for drafts that yielded no accepted draft.

        After more than `most` failures in succession, drafts are paused for 2 tokens. Each further failure doubles the
        pause, up to 32 tokens.

        Args:
            length: The row's current length in tokens.
            most: The number of failures that are tolerated without a pause.
        """
        self.failures += 1
        if self.failures > most:
            self.resumes = length + min(_LONGEST_PAUSE, 1 << min(self.failures - most, 10))

    def reset(self) -> None:
        """Set the number of failures to 0 and end the pause, after a draft was accepted."""
        self.failures = self.resumes = 0


SHARE = 0.05  # budget for searching, as a share of the time that steps would take without drafts
_SAVED_STEPS = 20  # the budget accumulates over at most this number of steps
_NEWEST = 0.2  # weight of the newest search in a moving average


class SearchBudget:
    """A budget for the time spent on searching texts for drafts.

    Each step adds 5 % of its duration to the budget, and each search subtracts its own duration. At most the shares of
    20 steps accumulate.
    """

    def __init__(self) -> None:
        self._row_s = 0.0  # measured time to search one row; 0: not measured yet
        self._allowed_s = self._most_allowed_s = 0.0

    @property
    def is_spent(self) -> bool:
        """True if the rest of the budget is shorter than the average time to search a row's text for drafts."""
        return bool(self._row_s) and self._allowed_s < self._row_s

    def rows(self, ready: int) -> int:
        """Return the maximum number of rows for which the time budget allows a search for drafts.

        Args:
            ready: The number of rows that could be searched. It is returned until the first search has been timed.
        """
        if self._row_s <= 0:
            return ready
        most = int(max(0.0, self._allowed_s) / self._row_s)
        if not most and self._allowed_s >= self._most_allowed_s:
            most = 1  # otherwise it would never be noticed that searching has become faster
        return most

    def subtract(self, seconds: float) -> None:
        """Subtract the duration of a search for drafts, in seconds, from the budget."""
        self._allowed_s -= seconds

    def record_search(self, rows: int, seconds: float) -> None:
        """Update the average time that a search for drafts takes per row.

        Args:
            rows: The number of rows that were searched, at least 1.
            seconds: The time that the search took for all of them.
        """
        each = seconds / rows
        self._row_s += _NEWEST * (each - self._row_s) if self._row_s else each

    def record_step(self, seconds: float) -> None:
        """Add 5 % of a step's duration to the budget.

        Args:
            seconds: The time that it would have taken to generate the tokens of the step without drafts.
        """
        share = SHARE * seconds
        self._most_allowed_s = _SAVED_STEPS * share
        self._allowed_s = min(self._allowed_s + share, self._most_allowed_s)
