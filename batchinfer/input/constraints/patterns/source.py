"""A regular expression as a text that is read from left to right, and what is said where it cannot be read on."""

from __future__ import annotations

import re
from typing import NoReturn


class BadPattern(ValueError):
    """A regular expression that is refused; the message names the construct, its place, and what to write."""


class PatternSource:
    """The text and a position in it."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self.at = pattern, 0

    @property
    def ended(self) -> bool:
        return self.at >= len(self._pattern)

    def peek(self, count: int = 1) -> str:
        """The next characters, fewer at the end."""
        return self._pattern[self.at : self.at + count]

    def take(self) -> str:
        """The next character; empty at the end."""
        self.at += 1
        return self._pattern[self.at - 1 : self.at]

    def took(self, text: str) -> bool:
        """Pass over `text`, if it comes next."""
        found = self._pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def matched(self, expression: re.Pattern[str], begin: int) -> str:
        """Return the text that an expression (which may match nothing) matches from `begin` on, and move behind it."""
        found = expression.match(self._pattern, begin)
        text = found[0] if found is not None else ""
        self.at = begin + len(text)
        return text

    def until(self, end: str) -> str | None:
        """Return the text before `end`, and move behind both; None if `end` does not occur."""
        found = self._pattern.find(end, self.at)
        if found < 0:
            return None
        text = self._pattern[self.at : found]
        self.at = found + len(end)
        return text

    def bad(self, begin: int, why: str) -> NoReturn:
        """Raise BadPattern for what stands from `begin` to here."""
        what = self._pattern[begin : self.at][:40]
        shown = "".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in what)
        raise BadPattern(f"{shown} at character {begin + 1} {why}")
