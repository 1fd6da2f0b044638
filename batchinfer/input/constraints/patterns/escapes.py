"""Parses escapes: a backslash and the characters after it."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.input.constraints.patterns.chars import CLASSES, LAST, Chars
from batchinfer.input.constraints.patterns.properties import property_syntax
from batchinfer.input.constraints.patterns.source import PatternSource

_CONTROLS: Mapping[str, int] = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_HEX = frozenset("0123456789abcdefABCDEF")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BOUNDARY = (
    "is a word boundary, which cannot be followed; write the characters next to it, such as "
    "(?:^|[^A-Za-z0-9_])"
)
_GROUP = "refers to a group, which cannot be followed; write the group's expression again"
# Escapes of other languages, with their equivalents in ECMAScript
_FOREIGN: Mapping[str, str] = {
    "A": "is not ECMAScript; write ^",
    "z": "is not ECMAScript; write $",
    "Z": "is not ECMAScript; write $",
    "a": r"is not ECMAScript; write \x07",
    "e": r"is not ECMAScript; write \x1b",
    "h": r"is not ECMAScript; write [ \t]",
    "R": r"is not ECMAScript; write (?:\r\n|[\n\r])",
    "X": "is not ECMAScript; write a class of characters",
    "U": r"is not ECMAScript; write \u{…} with the code point in hexadecimal digits",
    "N": r"is not ECMAScript; write \u{…} with the code point in hexadecimal digits",
    "Q": "is not ECMAScript; write a backslash before each special character",
    "E": "is not ECMAScript; write a backslash before each special character",
    "G": "is not ECMAScript; leave it out",
    "K": "is not ECMAScript; leave it out",
    "k": _GROUP,
    "b": _BOUNDARY,
    "B": _BOUNDARY,
}


def read_escape(source: PatternSource, in_class: bool) -> Chars | int:
    r"""Parse an escape such as \d or \u0041. The backslash has already been read.

    Args:
        source: The pattern with its reading position.
        in_class: True inside a character class in brackets.

    Returns:
        A set of characters, or a code point, which may be a surrogate.
    """
    begin, char = source.at - 1, source.take()
    if char in CLASSES:
        return CLASSES[char]
    if char in ("p", "P"):
        return _property(source, begin, char)
    if char in _CONTROLS:
        return _CONTROLS[char]
    if char == "x":
        return _hexadecimal(source, begin, 2)
    if char == "u":
        return _unicode(source, begin)
    if char == "c":
        return _control(source, begin)
    if in_class and char == "b":
        return 0x08
    if char.isdigit() and char.isascii():
        return _digit(source, begin, char, in_class)
    return _itself(source, begin, char)


def _itself(source: PatternSource, begin: int, char: str) -> int:
    if not char:
        source.bad(begin, "ends the expression; write \\\\ for a backslash")
    if char in _FOREIGN:
        source.bad(begin, _FOREIGN[char])
    if not char.isascii() or char.isalnum() or not char.isprintable():
        source.bad(begin, "is not ECMAScript; write the character without a backslash")
    return ord(char)


def _digit(source: PatternSource, begin: int, char: str, in_class: bool) -> int:
    if char == "0" and not (source.peek().isdigit() and source.peek().isascii()):
        return 0
    if char == "0" or in_class:
        source.bad(begin, r"is not ECMAScript; write \x and two hexadecimal digits for a code")
    source.bad(begin, _GROUP)


def _control(source: PatternSource, begin: int) -> int:
    letter = source.take()
    if letter not in _LETTERS:
        source.bad(begin, r"is not ECMAScript; write \c and a letter, or \\ for a backslash")
    return ord(letter) % 32


def _hexadecimal(source: PatternSource, begin: int, digits: int) -> int:
    text = source.peek(digits)
    if len(text) < digits or not _HEX.issuperset(text):
        braced = source.accept("{") and source.until("}") is not None
        advice = r"write \u{…}" if braced else f"write {digits} hexadecimal digits behind it, or \\u{{…}}"
        source.bad(begin, f"is not ECMAScript; {advice}")
    source.at += digits
    return int(text, 16)


def _unicode(source: PatternSource, begin: int) -> int:
    if source.accept("{"):
        return _braced(source, begin)
    code = _hexadecimal(source, begin, 4)
    if 0xD800 <= code <= 0xDBFF and source.peek(2) == "\\u" and _HEX.issuperset(source.peek(6)[2:]):
        low = int(source.peek(6)[2:] or "0", 16)
        if 0xDC00 <= low <= 0xDFFF:  # a surrogate pair
            source.at += 6
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
    return code


def _braced(source: PatternSource, begin: int) -> int:
    text = source.until("}")
    if not text or not _HEX.issuperset(text):
        source.bad(
            begin, r"is not ECMAScript; write hexadecimal digits between the braces, such as \u{1F600}"
        )
    if len(text.lstrip("0")) > 6 or int(text, 16) > LAST:
        source.bad(begin, "is beyond the last character, U+10FFFF; write a smaller code point")
    return int(text, 16)


def _property(source: PatternSource, begin: int, letter: str) -> Chars:
    name = source.until("}") if source.accept("{") else None
    if name is None:
        source.bad(begin, r"is not ECMAScript; write a property's name in braces, such as \p{L}")
    syntax, advice = property_syntax(name)
    if syntax is None:
        source.bad(begin, f"names a property that ECMAScript does not have; {advice}")
    return Chars.of((), [f"\\{letter}{{{syntax}}}"])
