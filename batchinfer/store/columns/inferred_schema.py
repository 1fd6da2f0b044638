"""Infers a JSON Schema that all examples match and that is as narrow as possible.

Memory grows with the kinds of values, not with the number of examples. An object with too many names stays open, and
distinct texts are forgotten once there are too many of them for an enum.

The library genson (1.4) has no enums and formats, so columns would lose their types. It also keeps every name of an
object whose names are data (3,000 properties for 3,000 rows).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.store.columns.column_kinds import (
    Kind,
    Unfit,
    day,
    moment,
    time_of_day,
    universally_unique,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MAX_PARTS = 4096  # maximum properties and items of all objects together
MAX_PROPERTIES = 512  # maximum properties of an object; if there are more, its names are data
MAX_DEPTH = 28  # maximum depth of lists and objects; a schema may be 64 deep, and uses two levels for each
ENUM_TEXTS, ENUM_CHARS = 24, 100  # maximum texts of an enum, and characters per text
ENUM_SEEN, ENUM_REPEATS = 20, 5  # minimum examples for an enum, in total and on average per text
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DATE = r"\d{4}-\d{2}-\d{2}"
# The formats as JSON Schema defines them; columns accept more
_FORMATS: Mapping[str, tuple[re.Pattern[str], Callable[[], Kind]]] = {
    "date": (re.compile(_DATE, re.ASCII), day),
    "time": (re.compile(_TIME, re.ASCII), time_of_day),
    "date-time": (re.compile(f"{_DATE}T{_TIME}", re.ASCII), moment),
    "uuid": (re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"), universally_unique),
}


class NoJson(ValueError):
    """An error for a value that has no equivalent in JSON. The message describes it."""


class InferredSchema:
    """Infers a JSON schema that is as narrow as possible from examples, which are parsed JSON values."""

    def __init__(self) -> None:
        self._parts = _Parts(MAX_PARTS)
        self._root = _Part()

    def add(self, example: Any) -> None:
        """Add an example, a parsed JSON value. If it raises NoJson, nothing was added."""
        _check(example)
        self._root.add(example, self._parts, MAX_DEPTH)

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema that all added examples match."""
        return {"$schema": DIALECT, **self._root.schema()}

    def notes(self) -> Iterator[str]:
        """Yield remarks for users about fields with an unusual type.

        Each begins with the path of the field.
        """
        pending: list[tuple[str, Any]] = [("", self.schema)]
        while pending:
            place, schema = pending.pop()
            if "$comment" in schema:
                yield f"{place or 'the answer'}: {schema['$comment']}"
            within = schema.get("properties", {}).items()
            pending += [(f"{place}.{name}" if place else name, one) for name, one in reversed(within)]
            pending += [(f"{place}[]", one) for one in [schema.get("items")] if one is not None]


@dataclass(slots=True)
class _Parts:
    left: int

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


@dataclass(slots=True)
class _LargeIntegers:
    """Records if examples have integers that a column of 64-bit integers, or of floats, cannot hold.

    Attributes:
        beyond: True if an integer exceeds 64 bits.
        inexact: True if an integer has more digits than a 64-bit float.
    """

    beyond: bool = False
    inexact: bool = False

    def add(self, value: int) -> None:
        self.beyond = self.beyond or not -(2**63) <= value < 2**63
        self.inexact = self.inexact or not _is_float(value)

    def of_numbers(self, types: list[str]) -> dict[str, Any] | None:
        # None: columns of the given types can hold all integers
        numbers = [name for name in types if name in ("integer", "number")]
        if {*types} - {*numbers, "null"} or not numbers or (numbers == ["integer"] and not self.beyond):
            return None
        rest = [name for name in types if name == "null"]
        if self.inexact:
            why = "There are integers of more digits than a column of numbers holds: it is JSON text."
            return {"anyOf": [{"type": name} for name in ("integer", "number", *rest)], "$comment": why}
        if not self.beyond:
            return None
        why = "There are integers beyond 64 bits: it is a number, its column one of 64-bit floats."
        return {"type": ["number", *rest] if rest else "number", "$comment": why}


def _is_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


@dataclass(slots=True)
class _CommonTexts:
    """The texts at one path of the examples: decides if they are an enum, or have a format such as a date.

    Attributes:
        seen: Number of texts.
        distinct: The distinct texts. None: there are too many, or one is too long.
        formats: The formats that all texts have.
    """

    seen: int = 0
    distinct: dict[str, None] | None = field(default_factory=dict)
    formats: dict[str, Kind] = field(
        default_factory=lambda: {name: made() for name, (_, made) in _FORMATS.items()}
    )

    def add(self, text: str) -> None:
        self.seen += 1
        for name in list(self.formats):
            if not _is_of(name, self.formats[name], text):
                del self.formats[name]
        if self.distinct is not None:
            self.distinct[text] = None
            if len(self.distinct) > ENUM_TEXTS or len(text) > ENUM_CHARS:
                self.distinct = None

    def enum(self) -> list[str]:
        few = self.distinct or {}
        often = self.seen >= max(ENUM_SEEN, ENUM_REPEATS * len(few))
        return sorted(few) if often and not self.formats else []


class _Part:
    """Collects the values at one path of all examples, to infer their JSON schema."""

    def __init__(self) -> None:
        self._types: dict[str, None] = {}
        self._texts = _CommonTexts()
        self._integers = _LargeIntegers()
        self._items: _Part | None = None
        self._objects = 0
        self._names: dict[str, tuple[_Part, int]] = {}  # with the number of objects that have the name
        self._any = self._open = False

    def add(self, value: Any, parts: _Parts, depth: int) -> None:
        kind = _type_of(value)
        self._types[kind] = None
        if kind in ("array", "object") and depth == 0:
            self._any = True
        elif kind == "string":
            self._texts.add(value)
        elif kind == "integer":
            self._integers.add(value)
        elif kind == "array":
            self._add_items(value, parts, depth - 1)
        elif kind == "object":
            self._add_object(value, parts, depth - 1)

    def _add_items(self, values: list[Any], parts: _Parts, depth: int) -> None:
        if values and self._items is None:
            parts.take()
            self._items = _Part()
        for value in values:
            assert self._items is not None
            self._items.add(value, parts, depth)

    def _add_object(self, value: Mapping[str, Any], parts: _Parts, depth: int) -> None:
        self._objects += 1
        for name, one in value.items():
            if self._open:
                _check(one)
                continue
            known = self._names.get(name)
            if known is None and (len(self._names) >= MAX_PROPERTIES or not parts.take()):
                self._open = True
                self._names.clear()
                _check(one)
                continue
            part, seen = known or (_Part(), 0)
            part.add(one, parts, depth)
            self._names[name] = part, seen + 1

    def schema(self) -> dict[str, Any]:
        if self._any:
            return {}
        types = _types(self._types)
        if self._types.keys() <= {"string", "null"} and (texts := self._texts.enum()):
            return {"enum": [*texts, None] if "null" in types else texts}
        if (numbers := self._integers.of_numbers(types)) is not None:
            return numbers
        found: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
        if "string" in types and self._texts.formats:
            found["format"] = next(iter(self._texts.formats))
        if "array" in types:
            found |= (
                {"items": self._items.schema()} if self._items else {"items": {"type": "null"}, "maxItems": 0}
            )
        return found | (self._of_object() if "object" in types and not self._open else {})

    def _of_object(self) -> dict[str, Any]:
        return {
            "properties": {name: part.schema() for name, (part, _) in self._names.items()},
            "required": [name for name, (_, seen) in self._names.items() if seen == self._objects],
            "additionalProperties": False,
        }


def _is_of(name: str, kind: Kind, text: str) -> bool:
    if not _FORMATS[name][0].fullmatch(text):
        return False
    try:
        kind.check(text, "")
    except Unfit:
        return False
    return True


def _check(value: Any) -> None:
    kind = _type_of(value)
    for one in value.values() if kind == "object" else value if kind == "array" else ():
        _check(one)


def _types(seen: Mapping[str, None]) -> list[str]:
    kept = [name for name in seen if not (name == "integer" and "number" in seen)]
    return sorted(kept, key=lambda name: name == "null")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        raise NoJson(f"a number is {value}, which JSON does not have")
    for kind, name in _TYPES:
        if isinstance(value, kind):
            return name
    raise NoJson(f"a value is of the type {type(value).__name__}, which JSON does not have")


_TYPES = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
