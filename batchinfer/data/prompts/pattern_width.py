"""The most bytes that a text can have which a regular expression matches as a whole.

It reads what such expressions are mostly made of: literals, classes, groups, alternatives, bounded repetition. For
anything else it says that there is no bound, never one that is too small.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_COUNTS = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_MAX_NESTING = 100


class NoWidth(ValueError):
    """An expression without a bound, or one that is not understood; the message says why."""


@dataclass(frozen=True, slots=True)
class Written:
    """How characters are written: bytes of one, of the widest, and of those that `\\d` and `\\w` stand for."""

    one: Callable[[str], int]
    widest: int
    word: int


def _in_json(char: str) -> int:
    if char < " " or char == "\x7f":
        return 6
    return 2 if char in '"\\' else len(char.encode("utf-8", "replace"))


PLAIN = Written(lambda char: len(char.encode("utf-8", "replace")), 4, 4)
IN_JSON = Written(_in_json, 6, 1)


def pattern_width(pattern: str, written: Written, *, searched: bool) -> int:
    """`searched`: the pattern may match anywhere in the text, as in a JSON Schema, unless ^ and $ hold it.

    Raises NoWidth.
    """
    reader = _PatternReader(pattern, written, searched)
    width = reader.alternatives(top=True)
    if not reader.at_end:
        raise NoWidth("its brackets do not match")
    return width


class _PatternReader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, written: Written, searched: bool) -> None:
        self._pattern, self._written, self._searched = pattern, written, searched
        self._at = self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._pattern)

    def alternatives(self, top: bool = False) -> int:
        widths = [self._sequence(top)]
        while self._take("|"):
            widths.append(self._sequence(top))
        return max(widths)

    def _sequence(self, top: bool) -> int:
        begins, ends = top and self._take("^"), False
        width = 0
        while not ends and not self.at_end and self._peek() not in "|)":
            if top and self._take("$"):
                ends = True
            else:
                width += self._atom()
        if ends and not self.at_end and self._peek() != "|":
            raise NoWidth("something stands behind its $")
        if top and self._searched and not (begins and ends):
            raise NoWidth("it has no ^ at its start or no $ at its end, so that more may stand around it")
        return width

    def _atom(self) -> int:
        """One character, class or group with what repeats it."""
        char = self._next()
        if char == "(":
            width = self._group()
        elif char == "[":
            width = self._class()
        elif char == ".":
            width = self._written.widest
        elif char == "\\":
            width = self._escape()[1]
        elif char in "^$*+?{}]":
            raise NoWidth(f"{char!r} stands where it is not understood")
        else:
            width = self._written.one(char)
        return self._repeated(width)

    def _repeated(self, width: int) -> int:
        while not self.at_end and (char := self._peek()) in "*+?{":
            if char in "*+":
                raise NoWidth(f"{char!r} repeats without end; write {{0,n}}")
            if char == "?":
                self._at += 1
                continue
            counts = _COUNTS.match(self._pattern, self._at)
            if counts is None or (counts[2] and not counts[3]):
                raise NoWidth("a repetition has no end; write {n,m}")
            width *= int(counts[3] or counts[1])
            self._at = counts.end()
        return width

    def _group(self) -> int:
        if self._take("?") and not self._take(":"):
            raise NoWidth("it has a group of a special kind, (?")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise NoWidth(f"its groups are nested more than {_MAX_NESTING} deep")
        width = self.alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise NoWidth("its brackets do not match")
        return width

    def _escape(self) -> tuple[str, int]:
        """The character, empty for several, and its width."""
        char = self._next()
        if char in "dw":
            return "", self._written.word
        if char in "sDWS":
            return "", self._written.widest
        literal = _CONTROLS.get(char, char)
        if literal == char and (char.isalnum() or not char.isascii()):
            raise NoWidth(f"'\\{char}' is not understood")
        return literal, self._written.one(literal)

    def _class(self) -> int:
        negated, widths = self._take("^"), [0]
        while not self._take("]"):
            first, width = self._member()
            if self._pattern[self._at : self._at + 1] == "-" and self._pattern[self._at + 1 :][:1] != "]":
                self._at += 1
                last, _ = self._member()
                width = self._of_range(first, last)
            widths.append(width)
        return self._written.widest if negated else max(widths)

    def _member(self) -> tuple[str, int]:
        char = self._next()
        if char == "\\":
            return self._escape()
        if char in "[]" or self._pattern.startswith(("&&", "--", "~~"), self._at - 1):
            raise NoWidth("a class in it has parts that are not understood")
        return char, self._written.one(char)

    def _of_range(self, first: str, last: str) -> int:
        if not first or not last or not (first + last).isascii():
            return self._written.widest
        return max((self._written.one(chr(one)) for one in range(ord(first), ord(last) + 1)), default=0)

    def _peek(self) -> str:
        return self._pattern[self._at]

    def _next(self) -> str:
        if self.at_end:
            raise NoWidth("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, char: str) -> bool:
        found = self._pattern.startswith(char, self._at)
        self._at += found
        return found
