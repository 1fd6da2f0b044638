"""Converts values to plain JSON types, with limits on depth and size."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

MAX_DEPTH = 64


class NotPlain(ValueError):
    """A value has no JSON form, is nested too deeply, or is too large. The message says which."""


class TooLarge(NotPlain):
    """A value is too large. Its size is the characters in its texts plus the items in its lists and objects."""


def plain_json(value: Any, most: int) -> Any:
    """Return a copy of a value with JSON types only: tuples become lists, Decimals become int or float.

    Args:
        value: The value to convert.
        most: The maximum sum of two counts: the characters of all texts, and the items of all lists and objects.

    Raises:
        NotPlain: The value has no JSON form, is nested too deeply, or is too large.
    """
    return _Plain(most).of(value, 0)


class _Plain:
    def __init__(self, most: int) -> None:
        self._left = most

    def of(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._count(len(value), value)
        if isinstance(value, int | float | Decimal):
            return _number(value)
        if depth == MAX_DEPTH:
            raise NotPlain(f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            return {self._name(name): self.of(one, depth + 1) for name, one in self._each(value).items()}
        if isinstance(value, list | tuple):
            return [self.of(one, depth + 1) for one in self._each(value)]
        raise NotPlain(
            f"holds a {type(value).__name__}; text, numbers, true, false, lists and objects are read"
        )

    def _each(self, values: Any) -> Any:
        return self._count(len(values), values)

    def _name(self, name: Any) -> str:
        if not isinstance(name, str):
            raise NotPlain("has an object with a name that is no text")
        return str(self._count(len(name), name))

    def _count(self, size: int, value: Any) -> Any:
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
