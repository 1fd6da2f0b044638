"""The text of a regular expression with a reading position, and errors at that position."""

from __future__ import annotations

import re
from typing import NoReturn


class BadPattern(ValueError):
    """Raised for a regular expression that is invalid or unsupported.

    The message quotes the construct and gives advice.
    """


class PatternSource:
    """The text of a regular expression, and `at`, the position of the next character to read."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self.at = pattern, 0

    @property
    def ended(self) -> bool:
        """True if the reading position is at the end of the regular expression."""
        return self.at >= len(self._pattern)

    def peek(self, count: int = 1) -> str:
        """Return the next `count` characters of the regular expression, or fewer at its end. Do not move past them."""
        return self._pattern[self.at : self.at + count]

    def take(self) -> str:
        """Return the next character of the regular expression and move past it. At its end, return ""."""
        self.at += 1
        return self._pattern[self.at - 1 : self.at]

    def accept(self, text: str) -> bool:
        """If the regular expression continues with `text`, move past it and return True. Else return False."""
        found = self._pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def match(self, expression: re.Pattern[str], begin: int) -> str:
        """Match `expression` at the position `begin` of the regular expression, and return the matched text, or "".

        The reading position moves to the end of the match.
        """
        found = expression.match(self._pattern, begin)
        text = found[0] if found is not None else ""
        self.at = begin + len(text)
        return text

    def until(self, end: str) -> str | None:
        """Return the text of the regular expression up to the next `end`, and move past `end`.

        Return None and do not move if `end` does not occur.
        """
        found = self._pattern.find(end, self.at)
        if found < 0:
            return None
        text = self._pattern[self.at : found]
        self.at = found + len(end)
        return text

    def bad(self, begin: int, why: str) -> NoReturn:
        """Raise BadPattern about a part of the regular expression.

        Args:
            begin: The start of the part. It ends at the reading position, and is quoted in the message.
            why: The rest of the message after the quote.
        """
        what = self._pattern[begin : self.at][:40]
        shown = "".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in what)
        raise BadPattern(f"{shown} at character {begin + 1} {why}")
