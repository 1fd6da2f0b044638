"""Derives typed columns from a JSON Schema, before the first row.

Parts without an equivalent in Arrow stay JSON text, with a note. An object that does not set additionalProperties has
none, because answers are generated that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from batchinfer.input.constraints.schema_references import References, UnknownReference
from batchinfer.store.columns.column_kinds import (
    Enumeration,
    Kind,
    ListOf,
    Struct,
    boolean,
    day,
    integer,
    json_text,
    moment,
    null,
    number,
    text,
    time_of_day,
    universally_unique,
)

MAX_COLUMNS = 4096  # including nested ones
MAX_DEPTH = 32
_FORMATS: Mapping[str, Callable[[], Kind]] = {
    "date": day,
    "time": time_of_day,
    "date-time": moment,
    "uuid": universally_unique,
}
_PLAIN: Mapping[str, Callable[[], Kind]] = {
    "integer": integer,
    "number": number,
    "boolean": boolean,
    "null": null,
}
# Keywords that do not change a type, so they are allowed next to `$ref` and `anyOf`
_NEUTRAL = frozenset(
    (
        "$schema",
        "$id",
        "$defs",
        "$comment",
        "$anchor",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
    )
) | {"deprecated", "readOnly", "writeOnly", "nullable"}


class NoColumns(ValueError):
    """An error for a JSON schema from which no result columns can be derived.

    The message says what to change.
    """


@dataclass(frozen=True, slots=True)
class Note:
    """A remark that a part of a JSON schema has no Arrow type, so its values are stored as JSON text.

    Attributes:
        place: The path of the part, or empty for the whole schema.
        why: The reason, for users.
    """

    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.place or 'the answer'}: JSON text, because {self.why}"


@dataclass(frozen=True)
class SchemaColumns:
    """The result columns for JSON answers that match a schema.

    Attributes:
        kind: The type of column for the whole answer.
        column: The name of the single result column. None: each property of the answer is a column.
        notes: The parts of the schema whose values are stored as JSON text.
    """

    kind: Kind
    column: str | None
    notes: tuple[Note, ...]

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the names and Arrow types of the result columns."""
        if self.column is not None:
            return pa.schema([(self.column, self.kind.type)])
        return pa.schema(list(self.kind.type))

    def check(self, answer: Any) -> None:
        """Raise Unfit if the result columns cannot hold an answer, which is a parsed JSON value."""
        self.kind.check(answer, self.column or "")

    def arrays(self, answers: Sequence[Any]) -> list[pa.Array]:
        """Return an Arrow array for each result column.

        Args:
            answers: Parsed JSON answers that passed `check`, one per row. None becomes null.
        """
        if self.column is not None:
            return [self.kind.array(answers)]
        assert isinstance(self.kind, Struct)
        return self.kind.arrays(answers)


def schema_columns(schema: Any, column: str | None = None) -> SchemaColumns:
    """Derive the result columns for JSON answers from their JSON schema.

    Args:
        schema: The parsed JSON schema.
        column: The name of a single column for the whole answer. None: each property is a column.

    Raises:
        NoColumns: The schema has no properties, or their names clash.
    """
    reader = _SchemaReader(schema)
    if column is not None:
        kind = reader.kind(schema, column)
    else:
        kind = reader.top()
    return SchemaColumns(kind, column, tuple(reader.notes))


class _SchemaReader:
    def __init__(self, root: Any) -> None:
        self._root, self._references = root, References(root)
        self.notes: list[Note] = []
        self._open: list[int] = []  # ids of the enclosing schemas, to detect recursion
        self._columns = 0

    def top(self) -> Struct:
        try:
            schema = self._resolved(self._root)
        except _Untyped as reason:
            raise NoColumns(
                f"the schema gives no columns, because {reason}; give output.column a name"
            ) from None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        kinds = _type_names(schema) if isinstance(schema, dict) else []
        if not isinstance(properties, dict) or not properties or kinds not in ([], ["object"]):
            raise NoColumns("the schema names no properties to make columns of; give output.column a name")
        _check_names(properties)
        if (why := _why_open(schema)) is not None:
            self.notes.append(
                Note(
                    "",
                    f"{why}; the properties that it names are columns, all others are only in generated_text",
                )
            )
        with self._inside(schema):
            return Struct({name: self.kind(one, name) for name, one in properties.items()})

    def kind(self, schema: Any, place: str) -> Kind:
        try:
            found = self._resolved(schema)
            self._columns += 1
            if self._columns > MAX_COLUMNS:
                raise _Untyped(f"there are more than {MAX_COLUMNS} columns before it")
            with self._inside(found):
                return self._typed(found, place)
        except _Untyped as reason:
            self.notes.append(Note(place, str(reason)))
            return json_text()

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if set(schema) - _NEUTRAL - {"$ref"}:
                raise _Untyped("there are other keywords next to its $ref")
            try:
                schema = self._references.resolve(schema["$ref"])
            except UnknownReference as error:
                raise _Untyped(str(error)) from None
        raise _Untyped("its references form a chain without end")

    @contextmanager
    def _inside(self, schema: Any) -> Iterator[None]:
        if id(schema) in self._open:
            raise _Untyped("it contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise _Untyped(f"it is nested more than {MAX_DEPTH} deep")
        self._open.append(id(schema))
        try:
            yield
        finally:
            self._open.pop()

    def _typed(self, schema: Any, place: str) -> Kind:
        if not isinstance(schema, dict):
            raise _Untyped("the schema does not say which type it has")
        for combined in ("allOf", "not", "if", "dependentSchemas"):
            if combined in schema:
                return self._of_one(schema, combined, place)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return self._alternatives(schema, choice, place)
        if "enum" in schema:
            return _of_values(schema["enum"])
        if "const" in schema:
            return _of_values([schema["const"]])
        return self._of_type(schema, place)

    def _of_one(self, schema: dict[str, Any], keyword: str, place: str) -> Kind:
        parts = schema.get("allOf")
        if keyword == "allOf" and isinstance(parts, list) and len(parts) == 1 and _has_only(schema, "allOf"):
            return self.kind(parts[0], place)
        raise _Untyped(f"{keyword} combines schemas")

    def _alternatives(self, schema: dict[str, Any], keyword: str, place: str) -> Kind:
        if not _has_only(schema, keyword):
            raise _Untyped(f"there are other keywords next to its {keyword}")
        branches = [self._resolved(one) for one in schema[keyword]]
        kept = [one for one in branches if not (isinstance(one, dict) and _type_names(one) == ["null"])]
        if len(kept) == 1:
            return self.kind(kept[0], place)
        if not kept:
            return null()
        raise _Untyped(f"its {keyword} has {len(kept)} alternatives")

    def _of_type(self, schema: dict[str, Any], place: str) -> Kind:
        names = _type_names(schema)
        kept = [name for name in names if name != "null"] or names
        if sorted(kept) == ["integer", "number"]:
            kept = ["number"]
        if len(kept) != 1:
            raise _Untyped("it has several types" if kept else "the schema does not say which type it has")
        if kept[0] == "object":
            return self._object(schema, place)
        if kept[0] == "array":
            return self._array(schema, place)
        if kept[0] == "string":
            return _FORMATS.get(str(schema.get("format")), text)()
        return _PLAIN[kept[0]]()

    def _object(self, schema: dict[str, Any], place: str) -> Kind:
        properties = schema.get("properties")
        if not properties:
            raise _Untyped("its properties are not named")
        if (why := _why_open(schema)) is not None:
            raise _Untyped(why)
        try:
            _check_names(properties)
        except NoColumns as error:
            raise _Untyped(str(error)) from None
        return Struct({name: self.kind(one, f"{place}.{name}") for name, one in properties.items()})

    def _array(self, schema: dict[str, Any], place: str) -> Kind:
        if "prefixItems" in schema:
            raise _Untyped("its first items have types of their own")
        if not isinstance(schema.get("items"), dict):
            raise _Untyped("the schema does not say which type its items have")
        return ListOf(self.kind(schema["items"], f"{place}[]"))


class _Untyped(Exception):
    """The reason that a part of a schema has no type in Arrow, as the end of "because …"."""


def _type_names(schema: dict[str, Any]) -> list[str]:
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def _has_only(schema: dict[str, Any], keyword: str) -> bool:
    return not set(schema) - _NEUTRAL - {keyword, "type"}


def _why_open(schema: dict[str, Any]) -> str | None:
    if schema.get("additionalProperties", False) is not False:
        return "additionalProperties allows more properties than the schema names"
    return (
        "patternProperties allows more properties than the schema names"
        if schema.get("patternProperties")
        else None
    )


def _check_names(names: Mapping[str, Any]) -> None:
    """Check that property names can be column names in SQL, which ignores case. Raises NoColumns."""
    seen: dict[str, str] = {}
    for name in names:
        if not name:
            raise NoColumns("one of its properties has an empty name")
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise NoColumns(f"its properties {other!r} and {name!r} differ in case only")


def _of_values(values: Sequence[Any]) -> Kind:
    kept = [one for one in values if one is not None]
    if not kept:
        return null()
    if all(isinstance(one, str) for one in kept):
        return Enumeration(kept)
    for kind, python in ((boolean, bool), (integer, int), (number, (int, float))):
        if all(isinstance(one, python) and (kind is boolean or not isinstance(one, bool)) for one in kept):
            return kind()
    raise _Untyped("its values have several types")
