"""How long a row is left alone for which nothing was found, or right."""

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
