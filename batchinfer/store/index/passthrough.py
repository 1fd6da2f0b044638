"""Writes input columns that are carried into the results, with their types.

Parquet and SQL declare types; a dictionary of texts stays one. JSON declares none: values are first spooled as JSON
text. After all rows, each column gets the narrowest type that holds all of its values exactly:

    bool < int64 < float64 < string (also if every value is null)

Texts stay as they are. Lists, objects, integers beyond 64 bits and columns of mixed types become strings of JSON text.
In a mixed column the texts stay as they are, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.part_writer import PartWriter
from batchinfer.filesystem.rebatch import parquet_batches, repeat_values
from batchinfer.input.chunk import InputChunk
from batchinfer.input.prompts.row_facts import RowFacts
from batchinfer.input.typed_rows import blank_rows
from batchinfer.store.index.even_batches import EvenBatches
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows

Times = NDArray[np.int64]
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}


class Kinds:
    """Records which kinds of JSON values, such as "int" or "null", occur in each passthrough column.

    The column's type is derived from them.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in columns}

    def add(self, name: str, kinds: set[str]) -> None:
        """Record the kinds of JSON values, such as "int" or "null", of some rows in the column `name`."""
        self._seen[name] |= kinds

    def type_of(self, name: str) -> pa.DataType:
        """Return the narrowest Arrow type that holds all recorded kinds of values of the column `name`."""
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
    """Collects passthrough columns of JSONL rows as JSON text. Their types are known after the last row."""

    def __init__(
        self, columns: Sequence[str], folder: Path, ops: FileOps, reused: ReusedRows = NO_REUSED_ROWS
    ) -> None:
        """Create temporary parts for passthrough columns.

        Args:
            columns: The names of the columns.
            folder: Folder for the temporary parts.
            ops: File operations.
            reused: The first rows of the index, whose columns are written already.
        """
        self._reused = reused
        self._columns = tuple(columns)
        self._ops = ops
        self._kinds = Kinds(columns)
        for facts in reused.facts:
            for name, kinds in zip(columns, facts.kinds, strict=True):
                self._kinds.add(name, kinds)
        fields = [("row_id", pa.int64()), *((name, pa.string()) for name in columns)]
        self._schema = pa.schema(fields)
        self._writer = PartWriter(folder, self._schema, ops)
        self._even = EvenBatches(self._writer, self._schema)

    def append(self, first_id: int, chunk: InputChunk, facts: RowFacts, times: Times) -> None:
        """Write the passthrough columns of a chunk as JSON text. Error rows have nulls.

        Args:
            first_id: The row id of the chunk's first row.
            chunk: The chunk. It is not used.
            facts: The column values of its rows.
            times: For each input row, the number of its index rows.
        """
        for name, kinds in zip(self._columns, facts.kinds, strict=True):
            self._kinds.add(name, kinds)
        ids = _row_ids(first_id, int(times.sum()))
        carried = (repeat_values(one, times) for one in facts.carried)
        self._even.append(pa.record_batch([ids, *carried], self._schema))

    def end_part(self) -> None:
        """End the current part. Later rows go to a new part. Raises StorageError."""
        self._even.commit()

    @property
    def fits(self) -> bool:
        """Return True if the columns written for reused rows have the types that all rows together need."""
        there = self._reused.carried
        return not there or pq.read_schema(there[0]).remove_metadata().equals(self._full)

    @property
    def _full(self) -> pa.Schema:
        typed = [(name, self._kinds.type_of(name)) for name in self._columns]
        return pa.schema([("row_id", pa.int64()), *typed])

    def finish(self, target: Path) -> None:
        """Write the passthrough columns with their final types to parts in the folder `target`.

        There is one part for each temporary part. Raises StorageError.
        """
        with self._writer:
            spooled = self._even.commit()
        full = self._full
        with PartWriter(target, full, self._ops, before=self._reused.carried) as writer:
            for part in spooled:
                for batch in parquet_batches([part], 1024):
                    writer.append(_typed(batch, full))
                writer.commit()

    def close(self) -> None:
        """Discard unfinished temporary parts."""
        self._writer.__exit__()


def _typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [batch.column(0)]
    for field in list(schema)[1:]:
        arrays.append(_converted(batch.column(field.name), field.type))
    return pa.record_batch(arrays, schema)


def _converted(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    # JSON and Arrow parse numbers in the same way
    return _plain_texts(texts) if pa.types.is_string(kind) else pc.cast(texts, kind)


def _plain_texts(texts: pa.StringArray) -> pa.StringArray:
    quoted = pc.starts_with(texts, '"')
    if pc.any(pc.and_(quoted, pc.match_substring(texts, "\\"))).as_py():
        return pa.array([_plain_text(text) for text in texts.to_pylist()], pa.string())
    return pc.if_else(quoted, pc.utf8_slice_codeunits(texts, 1, -1), texts)


def _plain_text(text: str | None) -> str | None:
    if text is not None and text.startswith('"'):
        return str(json.loads(text))
    return text


def _as(kind: pa.DataType, values: pa.Array) -> pa.Array:
    # The reader decodes dictionaries
    return values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values


class TypedColumns:
    """Writes passthrough columns whose types are known in advance: of Parquet, or texts of CSV."""

    fits = True  # the types are declared, so reused rows have the same types

    def __init__(
        self, schema: pa.Schema, target: Path, ops: FileOps, reused: ReusedRows = NO_REUSED_ROWS
    ) -> None:
        """Create a writer for passthrough columns.

        Args:
            schema: Names and types of the columns.
            target: Folder for the parts.
            ops: File operations.
            reused: The first rows of the index, whose columns are in `target` already.
        """
        self._schema = schema
        self._full = pa.schema([("row_id", pa.int64()), *schema])
        self._writer = PartWriter(target, self._full, ops, before=reused.carried)
        self._even = EvenBatches(self._writer, self._full)

    def append(self, first_id: int, chunk: InputChunk, facts: RowFacts, times: Times) -> None:
        """Write the passthrough columns of a chunk. Unreadable rows have nulls.

        Args:
            first_id: The row id of the chunk's first row.
            chunk: The chunk. Columns of Parquet are taken from its table.
            facts: The column values of its rows, for other formats.
            times: For each input row, the number of its index rows.
        """
        ids = _row_ids(first_id, int(times.sum()))
        if chunk.table is None:
            carried = (repeat_values(one, times) for one in facts.carried)
            self._even.append(pa.record_batch([ids, *carried], self._full))
            return
        table = chunk.table.slice(0, len(facts.ids))
        table = blank_rows(table, set(facts.unread)) if facts.unread else table
        own = (_as(field.type, table.column(field.name)) for field in self._schema)
        arrays = [ids, *(repeat_values(one, times) for one in own)]
        self._writer.append(pa.record_batch(arrays, self._full))

    def end_part(self) -> None:
        """End the current part. Later rows go to a new part. Raises StorageError."""
        self._even.commit()

    def finish(self, _: Path) -> None:
        """Finish the parts. Their folder was given to the constructor. Raises StorageError."""
        with self._writer:
            self._even.commit()

    def close(self) -> None:
        """Discard an unfinished part."""
        self._writer.__exit__()


def _row_ids(first: int, count: int) -> pa.Array:
    ids = pa.py_buffer(np.arange(first, first + count, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), count, [None, ids])
