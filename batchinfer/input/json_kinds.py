"""The kind of a JSON value, and its text, for columns that are carried into the results."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

_EXACT_FLOAT = 2**53  # a whole number beyond it may not survive as a float64
_INT64 = 2**63
KINDS = frozenset({"null", "bool", "text", "float", "int", "large int", "json"})
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def json_kind(value: Any) -> str:
    """Return one of KINDS: what decides the type of a column."""
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
    """Return the value as JSON with its characters as they are."""
    if type(value) is str:
        return encode_basestring(value)
    return str(value) if type(value) is int else _ENCODER.encode(value)
