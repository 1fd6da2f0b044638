"""Values that JSON can say, checked: of bounded depth and size, and made of Python's plain types."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

MOST_NESTED = 64


class NotPlain(ValueError):
    """The value cannot be said in JSON, is nested too deeply, or is too large. Its text says which."""


class TooLarge(NotPlain):
    """The value has more characters and items than are allowed."""


def plain_json(value: Any, most: int) -> Any:
    """The value with lists for tuples, and int or float for every other kind of number.

    `most` bounds the characters of all texts, and the items, together. Raises NotPlain.
    """
    return _Plain(most).of(value, 0)


class _Plain:
    """Copies one value, and counts what it has."""

    def __init__(self, most: int) -> None:
        self._left = most

    def of(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._taken(len(value), value)
        if isinstance(value, int | float | Decimal):
            return _number(value)
        if depth == MOST_NESTED:
            raise NotPlain(f"is nested more than {MOST_NESTED} deep")
        if isinstance(value, dict):
            return {self._name(name): self.of(one, depth + 1) for name, one in self._each(value).items()}
        if isinstance(value, list | tuple):
            return [self.of(one, depth + 1) for one in self._each(value)]
        raise NotPlain(
            f"holds a {type(value).__name__}; text, numbers, true, false, lists and objects are read"
        )

    def _each(self, values: Any) -> Any:
        return self._taken(len(values), values)

    def _name(self, name: Any) -> str:
        if not isinstance(name, str):
            raise NotPlain("has an object with a name that is no text")
        return str(self._taken(len(name), name))

    def _taken(self, size: int, value: Any) -> Any:
        self._left -= size
        if self._left < 0:
            raise TooLarge("is too large")
        return value


def _number(value: int | float | Decimal) -> int | float:
    if not math.isfinite(value):
        raise NotPlain("has a number that is not finite")
    if isinstance(value, float):
        return float(value)
    return int(value) if value == int(value) else float(value)
