"""Parses regular expressions: groups, alternatives, repetitions and anchors. A `Maker` builds the result.

No Python library fits: parsers of ECMAScript do not expose the syntax tree, and llguidance takes Rust's syntax.
Rewriting the text by rules would let constructs of Rust through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from batchinfer.input.constraints.patterns.chars import DOT, Chars, one
from batchinfer.input.constraints.patterns.classes import HALVES, char_class
from batchinfer.input.constraints.patterns.escapes import read_escape
from batchinfer.input.constraints.patterns.source import PatternSource

MAX_NESTING = 200  # maximum depth of groups
MAX_COUNT = 10**9
_COUNTS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_FLAGS = re.compile(r"[a-zA-Z^]*-?[a-zA-Z]*[:)]")
_ANCHORS, _REPEATS = ("^", "$"), ("*", "+", "?", "{")
_TEXT = re.compile(r"[^\\^$.*+?()\[\]{}|\ud800-\udfff]*")
_SPECIAL = frozenset("\\^$.*+?()[]{}|")
T = TypeVar("T")


class Maker(Protocol[T]):
    """Builds a result for a regular expression, such as its translation, from the results for its parts.

    `read_pattern` parses the expression and calls a method for each part, innermost parts first. T is the type of the
    results. The methods may raise ValueError.
    """

    def chars(self, chars: Chars) -> T:
        """Return the result for an expression that matches one character of the set `chars`."""
        ...

    def text(self, text: str) -> T:
        """Return the result for an expression that matches this text literally."""
        ...

    def open_ended(self, part: T, before: bool, behind: bool) -> T:
        """Return the result for a part at the start or the end of the expression, where the match may be within a text.

        Args:
            part: The result for the part.
            before: True if other text may precede it: the part is the first one and has no `^`.
            behind: True if other text may follow it: the part is the last one and has no `$`.
        """
        ...

    def sequence(self, parts: Sequence[T]) -> T:
        """Return the result for consecutive parts of an expression.

        Args:
            parts: The result of each part. Without parts, the expression matches the empty text.
        """
        ...

    def choice(self, ways: Sequence[T]) -> T:
        """Return the result for an expression with several alternatives.

        Args:
            ways: The result of each alternative.
        """
        ...

    def repeated(self, part: T, least: int, most: int | None) -> T:
        """Return the result for a repeated part of an expression.

        Args:
            part: The result of the part.
            least: The minimum count.
            most: The maximum count, or None without a maximum.
        """
        ...


@dataclass(frozen=True, slots=True)
class PatternPart(Generic[T]):
    """A part of a regular expression, such as a group, with the result that a Maker built for it.

    Args:
        made: The result of the Maker.
        start: True if the part begins with the anchor `^`.
        end: True if the part ends with the anchor `$`.
    """

    made: T
    start: bool = False
    end: bool = False


@dataclass(slots=True)
class _Group(Generic[T]):
    """A group of a regular expression whose closing parenthesis has not been read yet.

    Args:
        begin: The position of its opening parenthesis in the expression.
        parts: The parts of the alternative that is being read.
        ways: The alternatives before it.
    """

    begin: int
    parts: list[PatternPart[T]] = field(default_factory=list)
    ways: list[PatternPart[T]] = field(default_factory=list)


def read_pattern(pattern: str, maker: Maker[T]) -> T:
    """Parse a regular expression, and return the result that `maker` builds for it.

    Raises:
        BadPattern: The text is not a regular expression of ECMAScript with the flag u, or is unsupported: look-around,
            references to groups, word boundaries, or anchors in the middle.
    """
    return _PatternReader(pattern, maker).read()


class _PatternReader(Generic[T]):
    def __init__(self, pattern: str, maker: Maker[T]) -> None:
        self._source, self._maker = PatternSource(pattern), maker
        self._open: list[_Group[T]] = [_Group(0)]
        self._names: set[str] = set()

    def read(self) -> T:
        while not self._source.ended:
            self._element()
        group = self._open.pop()
        if self._open:
            self._source.at = group.begin + 1
            self._source.bad(group.begin, r"is not closed; write ) at its end, or \( for a bracket")
        return self._open_ended(self._close(group), start=True, end=True).made

    def _element(self) -> None:
        source, begin = self._source, self._source.at
        char = source.take()
        if char == "(":
            self._begin_group(begin)
        elif char == ")":
            self._end_group(begin)
        elif char == "|":
            self._end_way(self._open[-1])
        elif char in _ANCHORS:
            self._anchor(begin, char)
        elif text := self._text(begin):
            self._add(begin, PatternPart(self._maker.text(text)))
        else:
            self._add(begin, PatternPart(self._maker.chars(self._chars(begin, char))))

    def _text(self, begin: int) -> str:
        source = self._source
        text = source.match(_TEXT, begin)
        if len(text) > 1 and source.peek() in _REPEATS:
            source.at -= 1
            text = text[:-1]
        if len(text) < 2:
            source.at = begin + 1
            return ""
        return text

    def _chars(self, begin: int, char: str) -> Chars:
        source = self._source
        if char == "[":
            return char_class(source)
        if char == ".":
            return DOT
        code = read_escape(source, in_class=False) if char == "\\" else ord(char)
        if char in _SPECIAL and char != "\\":
            self._refuse_special(begin, char)
        if not isinstance(code, int):
            return code
        if 0xD800 <= code <= 0xDFFF:
            source.bad(begin, HALVES)
        return one(code)

    def _refuse_special(self, begin: int, char: str) -> None:
        if char in "*+?":
            self._source.bad(begin, f"repeats nothing; write \\{char} for the character")
        within = ", and classes without brackets inside" if char == "]" else ""
        self._source.bad(begin, f"is not a literal character; write \\{char}{within}")

    def _begin_group(self, begin: int) -> None:
        source = self._source
        if source.accept("?") and not source.accept(":"):
            self._special_group(begin)
        if len(self._open) > MAX_NESTING:
            source.bad(begin, f"is nested in more than {MAX_NESTING} others; write it flatter")
        self._open.append(_Group(begin))

    def _special_group(self, begin: int) -> None:
        source = self._source
        for kind in ("=", "!", "<=", "<!"):
            if source.accept(kind):
                source.bad(begin, "is look-ahead or look-behind, which cannot be followed; leave it out")
        if source.accept("<"):
            return self._named_group(begin)
        if source.accept("P"):
            source.accept("<")
            source.bad(begin, "is not ECMAScript; write (?<name>…), or (?:…) without a name")
        if found := _FLAGS.match(source.peek(20)):
            source.accept(found[0])
            source.bad(
                begin, "sets flags, which cannot be followed; write what is meant without them, such as [Aa]"
            )
        source.take()
        source.bad(begin, "is not ECMAScript; write (?:…)")

    def _named_group(self, begin: int) -> None:
        name = self._source.until(">")
        if name is None or not name.replace("$", "_").isidentifier():
            self._source.bad(
                begin, "is a group without a proper name; write (?<name>…), or (?:…) without one"
            )
        if name in self._names:
            self._source.bad(begin, "names a second group so; write another name, or (?:…) without one")
        self._names.add(name)

    def _end_group(self, begin: int) -> None:
        if len(self._open) == 1:
            self._source.bad(begin, r"closes no group; write \) for a bracket")
        group = self._open.pop()
        self._add(group.begin, self._close(group))

    def _close(self, group: _Group[T]) -> PatternPart[T]:
        self._end_way(group)
        if len(group.ways) == 1:
            return group.ways[0]
        start, end = any(way.start for way in group.ways), any(way.end for way in group.ways)
        ways = [self._open_ended(way, start, end).made for way in group.ways]
        return PatternPart(self._maker.choice(ways), start, end)

    def _open_ended(self, part: PatternPart[T], start: bool, end: bool) -> PatternPart[T]:
        before, behind = start and not part.start, end and not part.end
        made = self._maker.open_ended(part.made, before, behind) if before or behind else part.made
        return PatternPart(made, start, end)

    def _end_way(self, group: _Group[T]) -> None:
        parts, group.parts = group.parts, []
        made = self._maker.sequence([part.made for part in parts])
        group.ways.append(PatternPart(made, parts[0].start, parts[-1].end) if parts else PatternPart(made))

    def _anchor(self, begin: int, char: str) -> None:
        held = PatternPart(self._maker.sequence(()), char == "^", char == "$")
        parts = self._open[-1].parts
        if self._source.peek() in _REPEATS:
            self._source.bad(begin, f"cannot be repeated; write \\{char} for the character")
        if parts and parts[-1] == held:  # a repeated anchor has no effect
            return
        self._add(begin, held)

    def _add(self, begin: int, part: PatternPart[T]) -> None:
        source, parts = self._source, self._open[-1].parts
        if parts and part.start:
            source.bad(
                begin,
                "matches at the start only, and is not first; write ^ first, or \\^ for a ^",
            )
        if parts and parts[-1].end:
            source.bad(begin, "comes after a $, which must be last; write \\$ for a $")
        counts = self._counts()
        if counts is None:
            parts.append(part)
            return
        if part.start or part.end:
            source.bad(begin, "repeats an anchor; write ^ and $ outside of the repetition")
        parts.append(PatternPart(self._maker.repeated(part.made, *counts)))

    def _counts(self) -> tuple[int, int | None] | None:
        source, begin = self._source, self._source.at
        char = source.peek()
        if char not in _REPEATS:
            return None
        if char == "{":
            least, most = self._braces(begin)
        else:
            source.take()
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        source.accept("?")  # a lazy repetition matches the same texts
        if source.peek() in _REPEATS:
            source.take()
            source.bad(begin, "repeats a repetition; write (?:…) around the inner one")
        return least, most

    def _braces(self, begin: int) -> tuple[int, int | None]:
        source = self._source
        if (found := _COUNTS.match(source.peek(64))) is None:
            source.take()
            source.bad(begin, "is not a literal character; write \\{, or {n}, {n,} or {n,m} to repeat")
        source.accept(found[0])
        least, most = int(found[1]), int(found[3]) if found[3] else None if found[2] else int(found[1])
        if max(least, most or 0) > MAX_COUNT:
            source.bad(begin, f"repeats too often; write a count of at most {MAX_COUNT}")
        if most is not None and most < least:
            source.bad(begin, "ends before it begins; write the smaller count first")
        return least, most
