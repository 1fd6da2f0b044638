"""Repeated custom ids and equal sampled rows are found once all rows are known.

Both are found by DuckDB within a memory limit; only parts that hold such rows are written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.index.token_store import TokenStore
from batchinfer.data.input.rows import row_error
from batchinfer.data.prompts.keys import token_bytes, work_key
from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import FileOps
from batchinfer.data.storage.part_writer import PART_ROWS, rewrite_part

_WORK_COLUMNS = ("key", "token_offset", "token_count", "params", "greedy", "expected_tokens")


def refuse_repeated_ids(parts: Sequence[Path], spill: Path, ops: FileOps) -> int:
    """Turn every row whose custom_id an earlier row has into an error row; how many became one."""
    query = (
        "SELECT row_id, first FROM (SELECT row_id, error_code, min(row_id) OVER (PARTITION BY custom_id) AS first "
        f"FROM {parquet(parts)} WHERE custom_id IS NOT NULL) "
        "WHERE row_id > first AND error_code IS NULL ORDER BY row_id"
    )
    return _patch(parts, query, spill, ops, _as_error)


def number_equal_samples(
    parts: Sequence[Path], tokens: TokenStore, context: bytes, spill: Path, ops: FileOps
) -> int:
    """Give the k-th of otherwise equal sampled rows a key that says k; how many rows were given one."""
    query = (
        "SELECT row_id, k FROM (SELECT row_id, row_number() OVER (PARTITION BY key ORDER BY row_id) - 1 AS k "
        f"FROM {parquet(parts)} WHERE key IS NOT NULL AND NOT greedy) "
        "WHERE k > 0 ORDER BY row_id"
    )

    def numbered(row: dict[str, Any], occurrence: int) -> dict[str, Any]:
        prompt = token_bytes(tokens.read(row["token_offset"], row["token_count"]))
        return {**row, "key": work_key(context, row["params"], prompt, occurrence)}

    return _patch(parts, query, spill, ops, numbered)


def _as_error(row: dict[str, Any], first: int) -> dict[str, Any]:
    error = row_error(
        "duplicate_custom_id", f"row {first} has the same custom_id, and input.unique_ids is true"
    )
    blank = dict.fromkeys(_WORK_COLUMNS)
    return {
        **row,
        **blank,
        "error_code": error.code,
        "error_class": error.error_class,
        "error_message": error.message,
        "retryable": error.retryable,
    }


def _patch(parts: Sequence[Path], query: str, spill: Path, ops: FileOps, change: Any) -> int:
    if not parts:
        return 0
    count = 0
    with connection(spill) as database:
        found = _rows(database.sql(query).to_arrow_reader(4096))
        for number, patches in groupby(found, key=lambda pair: pair[0] // PART_ROWS):
            count += _patch_part(parts[number], patches, change, ops)
    return count


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, int]]:
    for batch in batches:
        yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


def _patch_part(path: Path, patches: Iterator[tuple[int, int]], change: Any, ops: FileOps) -> int:
    """Rows change one by one; the table between them is kept as it is."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    first = table.column("row_id")[0].as_py()
    columns = {name: table.column(name).to_pylist() for name in (*_WORK_COLUMNS, *_ERROR_COLUMNS)}
    count = 0
    for row_id, detail in patches:
        at = row_id - first
        for name, value in change({n: values[at] for n, values in columns.items()}, detail).items():
            columns[name][at] = value
        count += 1
    for name, values in columns.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(
            position, table.schema.field(name), pa.array(values, table.schema.field(name).type)
        )
    rewrite_part(path, table, ops)
    return count


_ERROR_COLUMNS = ("error_code", "error_class", "error_message", "retryable")
