"""The maximum number of bytes of the texts that a regular expression matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchinfer.input.constraints.patterns.chars import Chars, Range
from batchinfer.input.constraints.patterns.reader import read_pattern
from batchinfer.input.constraints.patterns.source import BadPattern

BytesOf = Callable[[Range], int]  # returns the maximum bytes of a character in a range


class NoWidth(ValueError):
    """Raised if an expression is invalid or its matches have no maximum length. The message gives the reason."""


def plain(chars: Range) -> int:
    """Return the maximum number of bytes in UTF-8 of a character in a range of code points."""
    return len(chr(chars[1]).encode())


def in_json(chars: Range) -> int:
    """Return the maximum number of bytes of a character in a range of code points within a JSON string.

    Control characters, quotes and backslashes are escaped there.
    """
    first, last = chars
    if first < 0x20 or first <= 0x7F <= last:
        return 6
    return max(2 if first <= 0x22 <= last or first <= 0x5C <= last else 1, plain(chars))


def pattern_width(pattern: str, written: BytesOf, *, searched: bool) -> int:
    """Return the maximum number of bytes of the texts that match a regular expression.

    Args:
        pattern: The regular expression.
        written: Returns the maximum number of bytes of a character in a range of code points, such as `plain`.
        searched: True if the pattern may match anywhere in the text unless it has ^ and $, as in a JSON Schema.

    Raises:
        NoWidth: There is no maximum.
    """
    try:
        return read_pattern(pattern, _WidthMaker(written, searched))
    except BadPattern as error:
        raise NoWidth(str(error)) from None


class _WidthMaker:
    def __init__(self, written: BytesOf, searched: bool) -> None:
        self._written, self._searched = written, searched

    def chars(self, chars: Chars) -> int:
        ranges = chars.ranges if chars.known else ((0, 0x10FFFF),)
        return max(map(self._written, ranges), default=0)

    def text(self, text: str) -> int:
        return sum(self._written((ord(char), ord(char))) for char in text)

    def open_ended(self, part: int, _before: bool, _behind: bool) -> int:
        if self._searched:
            raise NoWidth("it has no ^ at its start or no $ at its end, so any text may surround it")
        return part

    def sequence(self, parts: Sequence[int]) -> int:
        return sum(parts)

    def choice(self, ways: Sequence[int]) -> int:
        return max(ways)

    def repeated(self, part: int, _: int, most: int | None) -> int:
        if most is None:
            raise NoWidth("a repetition has no end, such as * and +; write {0,n}")
        return part * most
