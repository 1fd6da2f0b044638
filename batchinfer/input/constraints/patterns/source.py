"""The text of a regular expression with a reading position, and errors at that position."""

from __future__ import annotations

import re
from typing import NoReturn


class BadPattern(ValueError):
    """A regular expression that is rejected. The message names the construct, its place, and what to write."""


class PatternSource:
    """The text of a regular expression, and the reading position in it."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self.at = pattern, 0

    @property
    def ended(self) -> bool:
        """True at the end of the text."""
        return self.at >= len(self._pattern)

    def peek(self, count: int = 1) -> str:
        """Return the next characters without moving; fewer at the end."""
        return self._pattern[self.at : self.at + count]

    def take(self) -> str:
        """Return the next character and move past it; "" at the end."""
        self.at += 1
        return self._pattern[self.at - 1 : self.at]

    def accept(self, text: str) -> bool:
        """Return True and move past `text` if it comes next."""
        found = self._pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def match(self, expression: re.Pattern[str], begin: int) -> str:
        """Return the text that an expression matches at `begin`, perhaps "", and move past it."""
        found = expression.match(self._pattern, begin)
        text = found[0] if found is not None else ""
        self.at = begin + len(text)
        return text

    def until(self, end: str) -> str | None:
        """Return the text before `end`, and move past both; None if `end` does not occur."""
        found = self._pattern.find(end, self.at)
        if found < 0:
            return None
        text = self._pattern[self.at : found]
        self.at = found + len(end)
        return text

    def bad(self, begin: int, why: str) -> NoReturn:
        """Raise BadPattern about the text from `begin` to the reading position."""
        what = self._pattern[begin : self.at][:40]
        shown = "".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in what)
        raise BadPattern(f"{shown} at character {begin + 1} {why}")
