"""Sets of characters: ranges of code points, and Unicode properties that the regex engine knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]  # the first and the last code point, both inclusive

LAST = 0x10FFFF
_SURROGATES: Range = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    r"""A set of characters: ranges of code points and Unicode properties, or all other characters. No surrogates.

    Args:
        ranges: The ranges (first code point, last code point) in ascending order. They neither overlap nor touch.
        properties: Unicode properties in the syntax of Rust's crate regex, such as `\p{L}`.
        negated: True if the set has all characters that neither `ranges` nor `properties` contain. Always False
            without properties.
    """

    ranges: tuple[Range, ...]
    properties: tuple[str, ...] = ()
    negated: bool = False

    @classmethod
    def of(cls, ranges: Iterable[Range], properties: Iterable[str] = (), negated: bool = False) -> Chars:
        """Return the set of the characters in any of the ranges or properties, or its complement if `negated`.

        Args:
            ranges: Ranges (first code point, last code point) in any order. They may overlap.
            properties: Unicode properties in the syntax of Rust's crate regex.
            negated: True for the complement.
        """
        named = tuple(dict.fromkeys(properties))
        inside = _joined(ranges)
        if negated and not named:
            return cls(_others(inside))
        return cls(_others(_others(inside)), named, negated)

    @property
    def known(self) -> bool:
        """True if `ranges` lists all characters of the set: it has no Unicode properties."""
        return not self.properties

    @property
    def empty(self) -> bool:
        """True if the set has neither ranges nor Unicode properties. A set with properties never counts as empty."""
        return self.known and not self.ranges

    def holds(self, char: str) -> bool:
        """Return True if a range of the set contains the character. Properties and negation are ignored."""
        return any(first <= ord(char) <= last for first, last in self.ranges)

    def without(self, char: str) -> Chars:
        """Return a copy of the set without one character. The set must consist of ranges only."""
        code = ord(char)
        return Chars.of([*_others(self.ranges), (code, code)], negated=True)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges of code points, and merge ranges that overlap or touch."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _others(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return the complement of ranges of code points, without surrogates."""
    found, begin = [], 0
    for first, last in _joined([*ranges, _SURROGATES]):
        if first > begin:
            found.append((begin, first - 1))
        begin = last + 1
    if begin <= LAST:
        found.append((begin, LAST))
    return tuple(found)


def one(code: int) -> Chars:
    """Return the set that contains only the character with this code point. It must not be a surrogate."""
    return Chars(((code, code),))


DIGITS: tuple[Range, ...] = ((0x30, 0x39),)
WORD: tuple[Range, ...] = (*DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# WhiteSpace and LineTerminator of ECMA-262: U+0085 is neither, U+FEFF is
SPACES: tuple[Range, ...] = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
# The characters that `.` matches: all except LineTerminator
DOT = Chars.of([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)], negated=True)
CLASSES: dict[str, Chars] = {
    letter: Chars.of(ranges, negated=letter.isupper())
    for small, ranges in (("d", DIGITS), ("w", WORD), ("s", SPACES))
    for letter in (small, small.upper())
}
