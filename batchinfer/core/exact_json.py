"""Parses and writes JSON without losing digits of numbers."""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

_SHORT = 16  # characters: 15 digits and a point are exact as a float, if there is no exponent


class WrittenFloat(float):
    """A number of a JSON text that cannot be represented exactly as a float.

    Its value is the nearest float.

    Attributes:
        digits: The exact number as JSON text.
    """

    digits: str


class RepeatedName(ValueError):
    """A JSON object has the same name twice. Parsers differ in which of the values they use."""


def read_float(text: str) -> float:
    """Convert the text of a JSON number to the nearest float.

    If the float is not equal to the number, the result is a WrittenFloat, which keeps the exact digits.
    """
    number = float(text)
    if len(text) <= _SHORT and "e" not in text.lower():
        return number
    return number if repr(number) == text else _exact(number, text)


def _exact(number: float, text: str) -> float:
    try:
        exact = Decimal(text)
    except InvalidOperation:  # its exponent has more than 18 digits
        return number
    if math.isfinite(number) and Decimal(repr(number)) == exact:
        return number
    found = WrittenFloat(number)
    found.digits = str(exact)
    return found


def read_exactly(text: str | bytes) -> Any:
    """Parse a JSON text without losing digits of numbers.

    A number that a float cannot represent exactly becomes a WrittenFloat.

    Raises:
        ValueError: The text is not JSON, or an object has a name twice (RepeatedName).
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, parse_float=read_float, object_pairs_hook=_once_each)


def write_exactly(value: Any) -> str:
    """Return a value as compact JSON text. Numbers of type int, Decimal or WrittenFloat keep every digit."""
    try:
        return _written(value)
    except RecursionError:  # too deeply nested: readers of the text refuse it
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written(name)}:{_written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, WrittenFloat):
        return value.digits
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def repeated_name(pairs: list[tuple[str, Any]]) -> str | None:
    """Return the first repeated name of a JSON object, truncated to 100 characters; None if there is none.

    Args:
        pairs: The (name, value) pairs of the object.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name[:100]
        seen.add(name)
    return None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedName(
            f"has the name {repeated_name(pairs)!r} twice in one object; remove one of the two"
        )
    return found
