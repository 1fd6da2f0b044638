"""Calls as JSON: found in text that a model wrote, of which nothing is sure.

Nothing here raises. Arguments keep the characters that the model wrote: numbers have all their digits.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from batchinfer.core.tool_calls import Call
from batchinfer.core.tools import is_tool_name
from batchinfer.input.json_text import MAX_NESTING, nested_beyond

# Beginnings of calls that are tried in an answer. A failed try costs a search for its line: without a limit, a text
# of beginnings would take quadratic time
MOST_TRIED = 1024
_WHITE = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = ("arguments", "parameters")  # the names that models have for them
_NO_ARGUMENTS = "{}"
Span = tuple[int, int]


class Read(NamedTuple):
    """Calls, and where the text behind them begins."""

    calls: list[Call]
    end: int


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# Numbers stay text: Python refuses to read whole numbers of more than 4,300 digits
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_number)


def behind_space(text: str, at: int) -> int:
    """Return where the white space of JSON that begins at `at` ends."""
    found = _WHITE.match(text, at)
    return at if found is None else found.end()


def calls_at(text: str, at: int, needs: bool = False) -> Read | None:
    """Return the call, or the list of calls, that begins at `at`, or None. A list may be empty.

    Args:
        text: The answer.
        at: Where the JSON begins, or the white space before it.
        needs: If True, a call without arguments is none.
    """
    at = behind_space(text, at)
    return _listed(text, at, needs) if text.startswith("[", at) else _call_at(text, at, needs)


def value_end(text: str, at: int) -> tuple[int, bool]:
    """Return where the JSON value that begins at `at` ends, and True; or how far the text was read, and False."""
    try:
        return _DECODER.raw_decode(text, at)[1], True
    except json.JSONDecodeError as error:
        return error.pos, False
    except (ValueError, RecursionError):
        return len(text), False


def _call_at(text: str, at: int, needs: bool) -> Read | None:
    """Return the call that begins at `at`, an object with a name, or None."""
    spans = _members(text, at)
    if spans is None or "name" not in spans.values:
        return None
    name = _string(text, spans.values["name"])
    given = next((spans.values[key] for key in _ARGUMENTS if key in spans.values), None)
    if name is None or not is_tool_name(name) or (given is None and needs):
        return None
    arguments = _NO_ARGUMENTS if given is None else _arguments(text, given)
    return None if arguments is None else Read([Call(name, arguments)], spans.end)


def object_at(text: str, at: int) -> Span | None:
    """Return where the JSON object that begins at `at` lies; None: there is none."""
    spans = _members(text, at)
    return None if spans is None else (at, spans.end)


def whole_object(text: str) -> str | None:
    """Return the text without the white space around it if it is a JSON object."""
    text = text.strip(" \t\n\r")
    return text if object_at(text, 0) == (0, len(text)) else None


def json_value(text: str) -> str | None:
    """Return the text without the white space around it if it is JSON."""
    text = text.strip(" \t\n\r")
    if nested_beyond(text, MAX_NESTING):
        return None
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return text


class _Members(NamedTuple):
    """The places of an object's values by their names, and where it ends."""

    values: dict[str, Span]
    end: int


def _listed(text: str, at: int, needs: bool) -> Read | None:
    """Return the calls of the list that begins at `at`, or None if it is no list of calls."""
    calls: list[Call] = []
    first = behind_space(text, at + 1)
    if text.startswith("]", first):
        return Read(calls, first + 1)
    while text.startswith(("[", ","), at):
        found = _call_at(text, behind_space(text, at + 1), needs)
        if found is None:
            return None
        calls += found.calls
        at = behind_space(text, found.end)
    return Read(calls, at + 1) if text.startswith("]", at) else None


def _members(text: str, at: int) -> _Members | None:
    """Return the members of the object that begins at `at`; None: there is no such JSON, or it is nested too deeply."""
    if not text.startswith("{", at):
        return None
    try:
        found = _read_members(text, at)
    except (ValueError, RecursionError):
        return None
    return None if nested_beyond(text[at : found.end], MAX_NESTING) else found


def _read_members(text: str, start: int) -> _Members:
    """Raises ValueError, RecursionError."""
    values: dict[str, Span] = {}
    at = behind_space(text, start + 1)
    if text.startswith("}", at):
        return _Members(values, at + 1)
    while True:
        if not text.startswith('"', at):
            raise ValueError("no name of a member")
        name, at = _DECODER.raw_decode(text, at)
        at = behind_space(text, at)
        if not text.startswith(":", at):
            raise ValueError("no value of a member")
        first = behind_space(text, at + 1)
        _, at = _DECODER.raw_decode(text, first)
        values[name] = first, at
        at = behind_space(text, at)
        if text.startswith("}", at):
            return _Members(values, at + 1)
        if not text.startswith(",", at):
            raise ValueError("no end of an object")
        at = behind_space(text, at + 1)


def _string(text: str, span: Span) -> str | None:
    """Return the text that a JSON string says; None for other values."""
    found = _DECODER.decode(text[slice(*span)]) if text.startswith('"', span[0]) else None
    return found if isinstance(found, str) else None


def _arguments(text: str, span: Span) -> str | None:
    """Return arguments as JSON text. Some models write that text as a string, and null or an empty string for none."""
    given = text[slice(*span)]
    if given.startswith("{"):
        return given
    if given in ("null", '""'):
        return _NO_ARGUMENTS
    said = _string(text, span)
    return None if said is None or _has_surrogates(said) else whole_object(said)


def _has_surrogates(text: str) -> bool:
    """Whether it has a half of a pair of surrogates, which is no character."""
    return any("\ud800" <= one <= "\udfff" for one in text)
