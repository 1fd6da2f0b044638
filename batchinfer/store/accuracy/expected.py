"""The column of a result with expected values: how it is marked in the schema, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from batchinfer.filesystem.parquet_rows import ParquetRows
from batchinfer.store.columns.answer_check import parse_answer
from batchinfer.store.outputs.registry import answer_column, probability_column

ROWS = 4096  # rows read at a time
_MARK = b"batchinfer.expected"  # key in the metadata of the column; the value is the kind
Kind = Literal["text", "json"]


class Unreadable:
    """Replaces an expected value that begins like a JSON object or list, but is not valid JSON."""


UNREADABLE = Unreadable()


def mark_expected(schema: pa.Schema, column: str, typed: bool) -> pa.Schema:
    """Return the schema of a result in which the metadata of `column` says that it has the expected values.

    Args:
        schema: The schema.
        column: Name of the column with expected values.
        typed: True if answers follow a JSON schema, so they are compared as JSON. Values of a nested column
            are always compared as JSON, others as text.
    """
    place = schema.get_field_index(column)
    field = schema.field(place)
    kind = b"json" if typed or pa.types.is_nested(field.type) else b"text"
    return schema.set(place, field.with_metadata({_MARK: kind}))


@dataclass(frozen=True, slots=True)
class ExpectedColumn:
    """The column of a result with expected values, and the columns with answers.

    Attributes:
        name: The column with expected values.
        kind: How answers are compared with expected values: "json" (objects by field) or "text".
        answer: The column with answers.
        probability: The column with the probability of the answer, if there is one.
    """

    name: str
    kind: Kind
    answer: str
    probability: str | None

    @classmethod
    def of(cls, files: Sequence[Path]) -> ExpectedColumn | None:
        """Find the columns with expected values and answers in the files of a result.

        Return None if no column is marked as expected values, or the result has no answer column. Raises
        InputCorrupt for a damaged file.
        """
        schema = ParquetRows(files[:1]).schema
        found = {field.name: field.metadata[_MARK] for field in schema if _MARK in (field.metadata or {})}
        answer = answer_column(schema.names)
        if answer is None or not found:
            return None
        ((name, kind), *_) = found.items()
        return cls(name, "json" if kind == b"json" else "text", answer, probability_column(answer))

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the expected value of each row of a batch, or None for a null.

        If answers are compared as JSON, a text that looks like a JSON object or list but is invalid becomes
        UNREADABLE.
        """
        column = batch.column(self.name)
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values: list[Any] = column.to_pylist()
        if self.kind == "text":
            return values
        whole = _reader(column.type)
        return [None if value is None else whole(value) for value in values]


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    if pa.types.is_struct(kind):
        return _without_nulls
    if pa.types.is_map(kind):
        return dict
    return _json_value


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    # A null may mean that nothing is expected
    return {name: one for name, one in value.items() if one is not None}


def _json_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_answer(value)
    except (ValueError, RecursionError):
        return UNREADABLE if value.lstrip()[:1] in ("{", "[") else value


def result_batches(files: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the named columns of a result, 4096 rows at a time. Raises InputCorrupt for a damaged file."""
    rows = ParquetRows(files)
    yield from rows.batches(0, rows.rows, ROWS, columns)
