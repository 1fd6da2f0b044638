"""The columns of a store's parts: fixed columns, and columns that kinds of answers add."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import StorageError

COMPLETION_SCHEMA = pa.schema(
    [
        ("key", pa.binary(32)),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("text_length", pa.int32()),
        ("error_code", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("retryable", pa.bool_()),
    ]
)
# The machine class of an answer. Only parts with answers from a cluster have this column
ENGINE_CLASS = pa.field("engine_class", pa.string())


def schema_of(parts: Iterable[Path]) -> pa.Schema:
    """Return the columns that occur in any of these parts of the store, COMPLETION_SCHEMA first.

    Raises StorageError if a part cannot be read.
    """
    fields = {field.name: field for field in COMPLETION_SCHEMA}
    for part in parts:
        for field in _schema(part):
            fields.setdefault(field.name, field)
    return pa.schema(list(fields.values()))


def _schema(part: Path) -> pa.Schema:
    try:
        return pq.read_schema(part).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise damaged_part(part, error) from error


def damaged_part(part: Path, error: Exception) -> StorageError:
    """Return the StorageError for a damaged part of the store, with `error` as the reason and with advice."""
    what = " ".join(str(error).split())
    return StorageError(
        f"{part}: damaged: {what}; `batchinfer run --verify` drops it, and its rows run again"
    )


def pad_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of `schema`, in that order. Columns that the batch lacks are null."""
    there = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in there else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
