"""Decides how often rows are searched for drafts, and how long a search may take."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PAUSE = 32  # tokens, after a row's text turned out to have nothing to offer


@dataclass(slots=True)
class Patience:
    """Counts how often one after the other nothing was found for a row, or right. What fails too often is tried less
    and less often."""

    failures: int = 0
    resumes: int = 0  # the length from which on it is tried again

    def over(self, length: int) -> bool:
        """Whether a row that has become so long is tried."""
        return length >= self.resumes

    def failed(self, length: int, most: int) -> None:
        """Leave a row of this length alone for a while, if it failed more than `most` times."""
        self.failures += 1
        if self.failures > most:
            self.resumes = length + min(_LONGEST_PAUSE, 1 << min(self.failures - most, 10))

    def succeeded(self) -> None:
        """Forget its failures."""
        self.failures = self.resumes = 0


SHARE = 0.05  # of the time that steps would take without drafts: the most for a search
_SAVED_STEPS = 20  # whose share may be spent at once
_NEWEST = 0.2  # the weight of the newest search in a moving average


class SearchTime:
    """The time that may be spent on looking for drafts: a share of the time of steps, saved up to a limit."""

    def __init__(self) -> None:
        self._row_s = 0.0  # that looking at a row takes
        self._allowed_s = self._most_allowed_s = 0.0

    @property
    def is_spent(self) -> bool:
        """Return True if there is no time to look at a row."""
        return bool(self._row_s) and self._allowed_s < self._row_s

    def rows(self, ready: int) -> int:
        """Return how many of the rows that are ready there is time to look at."""
        if self._row_s <= 0:
            return ready
        most = int(max(0.0, self._allowed_s) / self._row_s)
        if not most and self._allowed_s >= self._most_allowed_s:
            most = 1  # otherwise a search that has become faster would not be noticed
        return most

    def spent(self, seconds: float) -> None:
        """Subtract the time of a search."""
        self._allowed_s -= seconds

    def looked_at(self, rows: int, seconds: float) -> None:
        """Learn how long looking at a row takes."""
        each = seconds / rows
        self._row_s += _NEWEST * (each - self._row_s) if self._row_s else each

    def stepped(self, seconds: float) -> None:
        """Add the share of a step that takes this long without drafts."""
        share = SHARE * seconds
        self._most_allowed_s = _SAVED_STEPS * share
        self._allowed_s = min(self._allowed_s + share, self._most_allowed_s)
