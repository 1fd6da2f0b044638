"""JSON whose numbers keep every digit that was written, from the text to the text that is made of it."""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

_SHORT = 16  # characters: at most 15 digits and a point, which every float holds, unless there is an exponent


class WrittenFloat(float):
    """A float that does not hold the number that was written. `digits` is that number as JSON."""

    digits: str


class RepeatedName(ValueError):
    """An object has a name twice: what it means depends on who reads it."""


def read_float(text: str) -> float:
    """The float nearest to the number in `text`. It is a WrittenFloat where it is another number."""
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
    """The value of a JSON text. Raises ValueError, RepeatedName among it, and RecursionError."""
    return json.loads(text, parse_float=read_float, object_pairs_hook=_once_each)


def written(value: Any) -> str:
    """A parsed value as compact JSON; numbers that were parsed as int, Decimal or WrittenFloat keep every digit."""
    try:
        return _written(value)
    except RecursionError:  # whoever reads it refuses what is nested so deeply
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written(name)}:{_written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, WrittenFloat):
        return value.digits
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RepeatedName(f"has the name {twice[:100]!r} twice in one object; leave one of them out")
    return found
