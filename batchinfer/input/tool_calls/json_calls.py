"""Parses calls written as JSON in text that may be arbitrary.

No function raises for invalid text. Arguments keep the characters of the model, such as all digits of numbers.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from batchinfer.core.tool_calls import Call
from batchinfer.core.tools import is_tool_name
from batchinfer.input.json_text import MAX_NESTING, nested_beyond

# Maximum number of attempts to parse a call in an answer. json computes the line number for each failure, so a text
# with many starts of calls would take quadratic time without a limit
MOST_TRIED = 1024
_WHITE = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = ("arguments", "parameters")  # the key of the arguments differs between models
_NO_ARGUMENTS = "{}"
Span = tuple[int, int]


class ParsedCalls(NamedTuple):
    """Tool calls that were parsed from an answer, and `end`, the position in the answer after them."""

    calls: list[Call]
    end: int


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# Numbers stay text, since Python rejects integers with more than 4,300 digits
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_number)


def skip_space(text: str, at: int) -> int:
    """Return the position of the first character at or after `at` that is not white space."""
    found = _WHITE.match(text, at)
    return at if found is None else found.end()


def calls_at(text: str, at: int, needs: bool = False) -> ParsedCalls | None:
    """Parse the tool call, or the list of tool calls, at a position of an answer.

    Args:
        text: The answer.
        at: The position of the JSON, or of white space before it.
        needs: True if a call must have arguments.

    Returns:
        The calls, none for an empty list. None if the JSON is no call or list of calls.
    """
    at = skip_space(text, at)
    return _listed(text, at, needs) if text.startswith("[", at) else _call_at(text, at, needs)


def value_end(text: str, at: int) -> tuple[int, bool]:
    """Find the end of the JSON value at position `at` of a text.

    Returns:
        (position after the value, True), or (position of the error, False) if the JSON is invalid.
    """
    try:
        return _DECODER.raw_decode(text, at)[1], True
    except json.JSONDecodeError as error:
        return error.pos, False
    except (ValueError, RecursionError):
        return len(text), False


def _call_at(text: str, at: int, needs: bool) -> ParsedCalls | None:
    spans = _members(text, at)
    if spans is None or "name" not in spans.values:
        return None
    name = _string(text, spans.values["name"])
    given = next((spans.values[key] for key in _ARGUMENTS if key in spans.values), None)
    if name is None or not is_tool_name(name) or (given is None and needs):
        return None
    arguments = _NO_ARGUMENTS if given is None else _arguments(text, given)
    return None if arguments is None else ParsedCalls([Call(name, arguments)], spans.end)


def object_at(text: str, at: int) -> Span | None:
    """Return the range (start, end) of the JSON object at position `at`, or None if there is no valid object."""
    spans = _members(text, at)
    return None if spans is None else (at, spans.end)


def whole_object(text: str) -> str | None:
    """Return the text without surrounding white space if it is a JSON object, else None."""
    text = text.strip(" \t\n\r")
    return text if object_at(text, 0) == (0, len(text)) else None


def json_value(text: str) -> str | None:
    """Return the text without surrounding white space if it is valid JSON, else None."""
    text = text.strip(" \t\n\r")
    if nested_beyond(text, MAX_NESTING):
        return None
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return text


class _Members(NamedTuple):
    values: dict[str, Span]
    end: int


def _listed(text: str, at: int, needs: bool) -> ParsedCalls | None:
    calls: list[Call] = []
    first = skip_space(text, at + 1)
    if text.startswith("]", first):
        return ParsedCalls(calls, first + 1)
    while text.startswith(("[", ","), at):
        found = _call_at(text, skip_space(text, at + 1), needs)
        if found is None:
            return None
        calls += found.calls
        at = skip_space(text, found.end)
    return ParsedCalls(calls, at + 1) if text.startswith("]", at) else None


def _members(text: str, at: int) -> _Members | None:
    if not text.startswith("{", at):
        return None
    try:
        found = _read_members(text, at)
    except (ValueError, RecursionError):
        return None
    return None if nested_beyond(text[at : found.end], MAX_NESTING) else found


def _read_members(text: str, start: int) -> _Members:
    values: dict[str, Span] = {}
    at = skip_space(text, start + 1)
    if text.startswith("}", at):
        return _Members(values, at + 1)
    while True:
        if not text.startswith('"', at):
            raise ValueError("no name of a member")
        name, at = _DECODER.raw_decode(text, at)
        at = skip_space(text, at)
        if not text.startswith(":", at):
            raise ValueError("no value of a member")
        first = skip_space(text, at + 1)
        _, at = _DECODER.raw_decode(text, first)
        values[name] = first, at
        at = skip_space(text, at)
        if text.startswith("}", at):
            return _Members(values, at + 1)
        if not text.startswith(",", at):
            raise ValueError("no end of an object")
        at = skip_space(text, at + 1)


def _string(text: str, span: Span) -> str | None:
    found = _DECODER.decode(text[slice(*span)]) if text.startswith('"', span[0]) else None
    return found if isinstance(found, str) else None


def _arguments(text: str, span: Span) -> str | None:
    # Some models write the text of the object as a JSON string, and null or an empty string for no arguments
    given = text[slice(*span)]
    if given.startswith("{"):
        return given
    if given in ("null", '""'):
        return _NO_ARGUMENTS
    quoted = _string(text, span)
    return None if quoted is None or _has_surrogates(quoted) else whole_object(quoted)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= one <= "\udfff" for one in text)
