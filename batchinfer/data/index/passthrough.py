"""Input columns that are carried into the results with their types.

Parquet and SQL declare types; a dictionary of texts stays one. JSON declares none: its values are first spooled
as JSON text, and once every row has been seen each column gets the narrowest type that holds all of its values
exactly:

    bool < int64 < float64 < string (also where every value is null)

Texts stay as they are. Lists, objects, whole numbers beyond 64 bits and columns of mixed types become strings
of JSON text; in a mixed column the texts still stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.data.input.rows import RowBatch
from batchinfer.data.storage.durable import FileOps
from batchinfer.data.storage.part_writer import PartWriter
from batchinfer.data.storage.rebatch import parquet_batches

_EXACT_FLOAT = 2**53  # a whole number beyond it may not survive as a float64
_INT64 = 2**63
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}


class Kinds:
    """Records the kinds of values of each column: at most six words a column, whatever the number of rows."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in columns}

    def note(self, name: str, value: Any) -> None:
        self._seen[name].add(_kind(value))

    def type_of(self, name: str) -> pa.DataType:
        """The column's type after all rows."""
        kinds = self._seen[name] - {"null"}
        if not kinds:
            return pa.string()
        if kinds <= {"int", "large int"}:
            return pa.int64()
        if "float" in kinds and kinds <= {"int", "float"}:
            return pa.float64()
        only = next(iter(kinds))
        return _TYPES.get(only, pa.string()) if len(kinds) == 1 else pa.string()


def _kind(value: Any) -> str:
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


class JsonSpool:
    """Passthrough columns of JSONL rows, kept as JSON text until their types are known."""

    def __init__(self, columns: Sequence[str], folder: Path, ops: FileOps) -> None:
        self._columns = tuple(columns)
        self._ops = ops
        self._kinds = Kinds(columns)
        fields = [("row_id", pa.int64()), *((name, pa.string()) for name in columns)]
        self._schema = pa.schema(fields)
        self._writer = PartWriter(folder, self._schema, ops)

    def append(self, first_id: int, batch: RowBatch) -> None:
        """Keep the columns of a batch; an error row has nulls."""
        arrays = [pa.array(range(first_id, first_id + len(batch.rows)), pa.int64())]
        arrays += [pa.array(list(self._texts(name, batch)), pa.string()) for name in self._columns]
        self._writer.append(pa.record_batch(arrays, self._schema))

    def _texts(self, name: str, batch: RowBatch) -> Iterator[str | None]:
        for row in batch.rows:
            if isinstance(row, RowError) or name not in row:
                yield None
                continue
            value = row[name]
            self._kinds.note(name, value)
            yield None if value is None else json.dumps(value, ensure_ascii=False)

    def finish(self, target: Path) -> tuple[list[Path], pa.Schema]:
        """Write the typed parts to `target`: (parts, schema without row_id)."""
        with self._writer:
            spooled = self._writer.commit()
        schema = pa.schema([(name, self._kinds.type_of(name)) for name in self._columns])
        full = pa.schema([("row_id", pa.int64()), *schema])
        with PartWriter(target, full, self._ops) as writer:
            for batch in parquet_batches(spooled, 1024):
                writer.append(_typed(batch, full))
            return writer.commit(), schema

    def close(self) -> None:
        """Give up what was not finished."""
        self._writer.__exit__()


def _typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [batch.column(0)]
    for field in list(schema)[1:]:
        arrays.append(_converted(batch.column(field.name), field.type))
    return pa.record_batch(arrays, schema)


def _converted(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        return pa.array([_plain_text(text) for text in texts.to_pylist()], kind)
    return pa.array([None if text is None else json.loads(text) for text in texts.to_pylist()], kind)


def _plain_text(text: str | None) -> str | None:
    if text is not None and text.startswith('"'):
        return str(json.loads(text))
    return text


def _as(kind: pa.DataType, values: pa.Array) -> pa.Array:
    """The reader unpacks dictionaries; a column that had one gets one of what is in these rows."""
    return values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values


class TypedColumns:
    """Passthrough columns that have types already: written as they are."""

    def __init__(self, schema: pa.Schema, target: Path, ops: FileOps) -> None:
        self._schema = schema
        self._full = pa.schema([("row_id", pa.int64()), *schema])
        self._writer = PartWriter(target, self._full, ops)

    def append(self, first_id: int, batch: RowBatch) -> None:
        """Write the columns of a batch."""
        if batch.table is None:
            raise ValueError("a batch without types among typed ones")
        ids = pa.array(range(first_id, first_id + len(batch.rows)), pa.int64())
        arrays = [ids, *(_as(field.type, batch.table.column(field.name)) for field in self._schema)]
        self._writer.append(pa.record_batch(arrays, self._full))

    def finish(self, target: Path) -> tuple[list[Path], pa.Schema]:
        """(parts, schema without row_id)."""
        with self._writer:
            return self._writer.commit(), self._schema

    def close(self) -> None:
        """Give up what was not finished."""
        self._writer.__exit__()
