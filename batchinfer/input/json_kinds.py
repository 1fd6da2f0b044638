"""The kind and the JSON text of values in columns that are copied to the results."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

_EXACT_FLOAT = 2**53  # float64 represents every integer up to here exactly
_INT64 = 2**63
KINDS = frozenset({"null", "bool", "text", "float", "int", "large int", "json"})
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def json_kind(value: Any) -> str:
    """Return the kind of a parsed JSON value: "null", "bool", "text", "float", "int", "large int" or "json".

    The kinds of all values of a column determine the type of the column in the results. Integers beyond ±2^53 are
    "large int". Integers beyond 64 bits, lists and objects are "json".
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "text"
    if isinstance(value, float):
        return "float"
    if isinstance(value, int):
        if -_EXACT_FLOAT <= value <= _EXACT_FLOAT:
            return "int"
        return "large int" if -_INT64 <= value < _INT64 else "json"
    return "json"


def json_text(value: Any) -> str:
    """Return a value as JSON text. Characters outside ASCII are not escaped."""
    if type(value) is str:
        return encode_basestring(value)
    return str(value) if type(value) is int else _ENCODER.encode(value)
