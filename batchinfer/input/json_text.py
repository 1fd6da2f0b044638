"""Strict JSON: rejects duplicate keys, NaN, lone surrogates and deep nesting, and keeps integers exact."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from batchinfer.core.exact_json import read_float
from batchinfer.input.rows import RowProblem, Values, kind_of
from batchinfer.input.text_encoding import UTF8, decode_record

MAX_NESTING = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_row(line: bytes, encoding: str = UTF8) -> Values:
    """Parse a line of a JSON lines file and return its object: the values of a row by column.

    Args:
        line: The line in UTF-8.
        encoding: The encoding of the file, for messages.

    Raises:
        RowProblem: The line is not a valid JSON object. No other exception is raised, whatever the bytes are.
    """
    text = decode_record(line, encoding)
    _check_nesting(text)
    value = _parse(text)
    if not isinstance(value, dict):
        raise RowProblem("not_an_object", f"the line holds {kind_of(value)}; a row is one JSON object: {{…}}")
    if _SURROGATE.search(line) is not None:
        _check_surrogates(value)
    return value


def parse_value(text: str) -> Any:
    """Parse a field of a file without types (CSV) as JSON, and return its value. Raises RowProblem."""
    _check_nesting(text)
    try:
        value = _DECODER.decode(text.strip())
    except ValueError:
        raise RowProblem("bad_json", "the prompt's column must hold JSON here: a list") from None
    _check_surrogates(value)
    return value


def _parse(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # as in "Unterminated string starting at"
        raise RowProblem("bad_json", f"{problem} at character {error.pos + 1} of the line") from None
    except ValueError as error:  # an integer with thousands of digits
        raise RowProblem("bad_json", f"{error}") from None


def _check_nesting(text: str) -> None:
    if nested_beyond(text, MAX_NESTING):
        raise RowProblem("nesting", f"lists and objects are nested more than {MAX_NESTING} deep")


def nested_beyond(text: str, most: int) -> bool:
    """Return True if the brackets [] and {} of a JSON text are nested more than `most` deep. Strings are skipped."""
    if text.count("[") + text.count("{") <= most:
        return False
    depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            in_string, escaped = escaped or char != '"', char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > most:
                return True
        elif char in "]}":
            depth -= 1
    return False


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowProblem(
            "lone_surrogate", "half of a surrogate pair (\\ud800 to \\udfff) stands alone: not a character"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise RowProblem("duplicate_keys", f"the key {key[:100]!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise RowProblem("nan", f"{name} is not a JSON number; write null")


def _finite(text: str) -> float:
    number = read_float(text)
    if math.isinf(number):
        raise RowProblem("nan", "a number is too large for a 64-bit float")
    return number


# strict=False accepts raw control characters (a NUL, a tab) in strings, since many exporters write them.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)
