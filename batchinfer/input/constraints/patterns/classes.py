"""Parses character classes in brackets."""

from __future__ import annotations

import re

from batchinfer.input.constraints.patterns.chars import Chars, Range
from batchinfer.input.constraints.patterns.escapes import read_escape
from batchinfer.input.constraints.patterns.source import PatternSource

_POSIX = re.compile(r"\[[:.=]\^?[A-Za-z0-9_]+[:.=]\]")
_ADVICE_POSIX = r"is not ECMAScript; write the characters themselves, such as A-Za-z0-9, or \p{Alphabetic}"
HALVES = (
    "matches halves of surrogate pairs, which are not characters; write the character itself, or "
    r"\u{10000}-\u{10FFFF}"
)


def char_class(source: PatternSource) -> Chars:
    """Parse a character class such as `[^a-z]` and return its characters. The opening bracket has already been read."""
    begin = source.at - 1
    negated = source.accept("^")
    ranges: list[Range] = []
    properties: list[str] = []
    while not source.accept("]"):
        if source.ended:
            source.bad(begin, "is not closed; write ] behind its last character, or \\[ for a bracket")
        _refuse_foreign(source)
        at, member = source.at, _member(source)
        if source.peek() == "-" and len(source.peek(2)) == 2 and source.peek(2) != "-]":
            source.take()
            ranges.append(_range(source, at, member, _member(source)))
        elif isinstance(member, int):
            ranges.append((member, member))
        else:
            ranges += member.ranges
            properties += member.properties
    found = Chars.of(ranges, properties, negated)
    if ranges and not negated and found.empty and any(map(_surrogate, ranges)):
        source.bad(begin, HALVES)
    return found


def _surrogate(one: Range) -> bool:
    return 0xD800 <= one[0] <= 0xDFFF


def _member(source: PatternSource) -> Chars | int:
    char = source.take()
    return read_escape(source, in_class=True) if char == "\\" else ord(char)


def _range(source: PatternSource, begin: int, first: Chars | int, last: Chars | int) -> Range:
    if not isinstance(first, int) or not isinstance(last, int):
        source.bad(begin, r"is no range, because a side is a class itself; write \- for a hyphen")
    if first > last:
        source.bad(begin, "is a range that ends before it begins; write the smaller character first")
    return first, last


def _refuse_foreign(source: PatternSource) -> None:
    """Raise BadPattern for syntax in a character class that other regex languages have, but not ECMAScript."""
    begin = source.at
    if source.accept("&&"):
        source.bad(begin, "in a class is no intersection; write the members themselves, or one & for an &")
    if found := _POSIX.match(source.peek(40)):
        source.accept(found[0])
        source.bad(begin, _ADVICE_POSIX)
