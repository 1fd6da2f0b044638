"""The column of a result with the values that its answers should have: how it is marked, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from batchinfer.filesystem.parquet_rows import ParquetRows
from batchinfer.store.columns.answer_check import parsed_answer
from batchinfer.store.outputs.registry import answer_column, probability_column

ROWS = 4096  # read at a time
_MARK = b"batchinfer.expected"  # in the metadata of the column; its value is the kind
Kind = Literal["text", "json"]


class Unreadable:
    """Stands for an expected value that is no JSON, although it begins like an object or a list."""


UNREADABLE = Unreadable()


def marked(schema: pa.Schema, column: str, typed: bool) -> pa.Schema:
    """Return the schema of a result in which `column` is marked as the one with expected values. `typed`: answers
    follow a schema. Values that are objects or lists are JSON in any case."""
    place = schema.get_field_index(column)
    field = schema.field(place)
    kind = b"json" if typed or pa.types.is_nested(field.type) else b"text"
    return schema.set(place, field.with_metadata({_MARK: kind}))


@dataclass(frozen=True, slots=True)
class ExpectedColumn:
    """The column of a result with expected values, and that of its answers. `json`: both are compared as JSON values,
    and those of objects by field; else as texts."""

    name: str
    kind: Kind
    answer: str
    probability: str | None  # the column that says how probable the answer is

    @classmethod
    def of(cls, files: Sequence[Path]) -> ExpectedColumn | None:
        """Find the column in the files of a result; None: its job named none. Raises InputCorrupt."""
        schema = ParquetRows(files[:1]).schema
        found = {field.name: field.metadata[_MARK] for field in schema if _MARK in (field.metadata or {})}
        answer = answer_column(schema.names)
        if answer is None or not found:
            return None
        ((name, kind), *_) = found.items()
        return cls(name, "json" if kind == b"json" else "text", answer, probability_column(answer))

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the expected value of each row, None where it has none, UNREADABLE where it cannot be read."""
        column = batch.column(self.name)
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values: list[Any] = column.to_pylist()
        if self.kind == "text":
            return values
        whole = _reader(column.type)
        return [None if value is None else whole(value) for value in values]


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return what makes JSON values of those of a column."""
    if pa.types.is_struct(kind):
        return _without_nulls
    if pa.types.is_map(kind):
        return dict
    return _json_value


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a struct that are not null: whether null is expected there or nothing, it does not say."""
    return {name: one for name, one in value.items() if one is not None}


def _json_value(value: Any) -> Any:
    """Return what the JSON text of a value says. A text that is no JSON is a value itself: the label of an answer that
    is a string."""
    if not isinstance(value, str):
        return value
    try:
        return parsed_answer(value)
    except (ValueError, RecursionError):
        return UNREADABLE if value.lstrip()[:1] in ("{", "[") else value


def result_batches(files: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield columns of a result's rows, some at a time. Raises InputCorrupt for a damaged file."""
    rows = ParquetRows(files)
    yield from rows.batches(0, rows.rows, ROWS, columns)
