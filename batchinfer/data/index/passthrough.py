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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.data.index.even_batches import EvenBatches
from batchinfer.data.input.chunk import InputChunk
from batchinfer.data.input.typed_rows import blanked
from batchinfer.data.prompts.row_facts import RowFacts
from batchinfer.data.storage.durable import FileOps
from batchinfer.data.storage.part_writer import PartWriter
from batchinfer.data.storage.rebatch import parquet_batches, repeated

Times = NDArray[np.int64]
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}


class Kinds:
    """Records the kinds of values of each column: at most six words a column, whatever the number of rows."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in columns}

    def add(self, name: str, kinds: set[str]) -> None:
        self._seen[name] |= kinds

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


class JsonSpool:
    """Passthrough columns of JSONL rows, kept as JSON text until their types are known."""

    def __init__(self, columns: Sequence[str], folder: Path, ops: FileOps) -> None:
        self._columns = tuple(columns)
        self._ops = ops
        self._kinds = Kinds(columns)
        fields = [("row_id", pa.int64()), *((name, pa.string()) for name in columns)]
        self._schema = pa.schema(fields)
        self._writer = PartWriter(folder, self._schema, ops)
        self._even = EvenBatches(self._writer, self._schema)

    def append(self, first_id: int, chunk: InputChunk, facts: RowFacts, times: Times) -> None:
        """Keep the columns of a chunk; an error row has nulls. `times`: how many rows of the result each row is."""
        for name, kinds in zip(self._columns, facts.kinds, strict=True):
            self._kinds.add(name, kinds)
        ids = _row_ids(first_id, int(times.sum()))
        carried = (repeated(one, times) for one in facts.carried)
        self._even.append(pa.record_batch([ids, *carried], self._schema))

    def finish(self, target: Path) -> tuple[list[Path], pa.Schema]:
        """Write the typed parts to `target`: (parts, schema without row_id)."""
        with self._writer:
            spooled = self._even.commit()
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


def _converted(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """JSON texts as values of this type, which holds all of them: numbers are read alike by JSON and by Arrow."""
    return _plain_texts(texts) if pa.types.is_string(kind) else pc.cast(texts, kind)


def _plain_texts(texts: pa.StringArray) -> pa.StringArray:
    """The texts without their quotes; other values stay JSON."""
    quoted = pc.starts_with(texts, '"')
    if pc.any(pc.and_(quoted, pc.match_substring(texts, "\\"))).as_py():
        return pa.array([_plain_text(text) for text in texts.to_pylist()], pa.string())
    return pc.if_else(quoted, pc.utf8_slice_codeunits(texts, 1, -1), texts)


def _plain_text(text: str | None) -> str | None:
    if text is not None and text.startswith('"'):
        return str(json.loads(text))
    return text


def _as(kind: pa.DataType, values: pa.Array) -> pa.Array:
    """The reader unpacks dictionaries; a column that had one gets one of what is in these rows."""
    return values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values


class TypedColumns:
    """Passthrough columns that have types already: written as they are, those of CSV as the texts that were read."""

    def __init__(self, schema: pa.Schema, target: Path, ops: FileOps) -> None:
        self._schema = schema
        self._full = pa.schema([("row_id", pa.int64()), *schema])
        self._writer = PartWriter(target, self._full, ops)
        self._even = EvenBatches(self._writer, self._full)

    def append(self, first_id: int, chunk: InputChunk, facts: RowFacts, times: Times) -> None:
        """Write the columns of a chunk; rows that could not be read have nulls. `times`: how many rows of the result
        each row is."""
        ids = _row_ids(first_id, int(times.sum()))
        if chunk.table is None:
            carried = (repeated(one, times) for one in facts.carried)
            self._even.append(pa.record_batch([ids, *carried], self._full))
            return
        table = chunk.table.slice(0, len(facts.ids))
        table = blanked(table, set(facts.unread)) if facts.unread else table
        own = (_as(field.type, table.column(field.name)) for field in self._schema)
        arrays = [ids, *(repeated(one, times) for one in own)]
        self._writer.append(pa.record_batch(arrays, self._full))

    def finish(self, target: Path) -> tuple[list[Path], pa.Schema]:
        """(parts, schema without row_id)."""
        with self._writer:
            return self._even.commit(), self._schema

    def close(self) -> None:
        """Give up what was not finished."""
        self._writer.__exit__()


def _row_ids(first: int, count: int) -> pa.Array:
    ids = pa.py_buffer(np.arange(first, first + count, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), count, [None, ids])
