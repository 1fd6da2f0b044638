"""Writes regular expressions in the syntax of llguidance's engine (Rust's crate regex), with explicit characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from batchinfer.input.constraints.patterns.chars import Chars, Range
from batchinfer.input.constraints.patterns.properties import holds_null
from batchinfer.input.constraints.patterns.reader import read_pattern
from batchinfer.input.constraints.patterns.source import BadPattern

_NULL, _ANYTHING = "\0", "(?s:.)*"
_PUNCTUATION = re.compile("[^A-Za-z0-9]")


def engine_pattern(pattern: str) -> str:
    """Translate a regular expression from ECMAScript to Rust's crate regex, to match a whole text.

    Raises:
        BadPattern: The pattern is invalid or unsupported.
    """
    return read_pattern(pattern, _SyntaxMaker())


def engine_pattern_in_json(pattern: str) -> tuple[str, bool]:
    """Translate a regular expression from ECMAScript to Rust's crate regex, to match anywhere in a JSON string.

    Returns:
        (translated expression, True if it matches fewer texts than the pattern). The character U+0000 is removed from
        most sets of characters, because llguidance 1.9 has a defect.

    Raises:
        BadPattern: The pattern is invalid or unsupported.
    """
    maker = _JsonSyntaxMaker()
    return f"^(?:{read_pattern(pattern, maker)})$", maker.narrowed


class _SyntaxMaker:
    def chars(self, chars: Chars) -> str:
        if chars.known and len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1]:
            return _char(chars.ranges[0][0])
        return f"[{'^' * chars.negated}{_members(chars)}]"

    def text(self, text: str) -> str:
        return _PUNCTUATION.sub(lambda found: _char(ord(found[0])), text)

    def open_ended(self, part: str, _before: bool, _behind: bool) -> str:
        return part

    def sequence(self, parts: Sequence[str]) -> str:
        return "".join(parts)

    def choice(self, ways: Sequence[str]) -> str:
        return f"(?:{'|'.join(ways)})"

    def repeated(self, part: str, least: int, most: int | None) -> str:
        return f"(?:{part}){{{least},{'' if most is None else most}}}"


class _JsonSyntaxMaker(_SyntaxMaker):
    def __init__(self) -> None:
        self.narrowed = False

    def open_ended(self, part: str, before: bool, behind: bool) -> str:
        return f"{_ANYTHING * before}(?:{part}){_ANYTHING * behind}"

    def text(self, text: str) -> str:
        if _NULL in text:
            raise _no_null()
        return super().text(text)

    def chars(self, chars: Chars) -> str:
        # In llguidance 1.9, a set with all control characters also matches quotes and backslashes
        if not _has_null(chars) or (chars.known and chars.holds('"') and chars.holds("\\")):
            return super().chars(chars)
        self.narrowed = True
        if not chars.known:
            return f"[{super().chars(chars)}&&[^\\x{{0}}]]"
        rest = chars.without(_NULL)
        if rest.empty:
            raise _no_null()
        return super().chars(rest)


def _no_null() -> BadPattern:
    return BadPattern("U+0000 cannot be followed in a JSON Schema; leave it out")


def _has_null(chars: Chars) -> bool:
    return (chars.holds(_NULL) or any(map(holds_null, chars.properties))) != chars.negated


def _members(chars: Chars) -> str:
    if chars.empty:
        return f"^{_range((0, 0x10FFFF))}"  # the empty set in the engine's syntax
    return "".join(map(_range, _bridged(chars.ranges))) + "".join(chars.properties)


def _bridged(ranges: Iterable[Range]) -> Iterator[Range]:
    # regex-syntax 0.8 wrongly negates ranges that only surrogates separate, so they are joined
    before: Range | None = None
    for one in ranges:
        if before is not None and (before[1], one[0]) == (0xD7FF, 0xE000):
            one = (before[0], one[1])
        elif before is not None:
            yield before
        before = one
    if before is not None:
        yield before


def _range(one: Range) -> str:
    return _char(one[0]) if one[0] == one[1] else f"{_char(one[0])}-{_char(one[1])}"


def _char(code: int) -> str:
    return char if (char := chr(code)).isascii() and char.isalnum() else f"\\x{{{code:x}}}"
