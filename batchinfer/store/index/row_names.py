"""Names the input rows of work keys for messages to the user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.core.errors import OutOfMemory, StorageError
from batchinfer.filesystem.duck import connection, parquet, translate_errors
from batchinfer.store.index.index import attempt_columns

NAMED = 8  # rows that are named; further rows are only counted


def name_rows(
    index_parts: Sequence[Path], keys: Sequence[bytes], spill: Path, attempts: int = 1, most: int = NAMED
) -> str:
    """Return text that names the input rows with some work keys, in input order.

    An example is `in.jsonl row 3 (id p3), in.jsonl row 7 and 12 more rows`.

    Args:
        index_parts: The parts of the index.
        keys: Work keys of 32 bytes.
        spill: Folder for temporary files of DuckDB.
        attempts: Maximum attempts per row.
        most: Maximum number of rows to name. Further rows are only counted.

    Raises:
        StorageError: The index cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    if not index_parts or not keys:
        return "no rows"
    with connection(spill, "256MiB", 1) as database, translate_errors(spill):
        database.register("wanted", pa.table({"key": pa.array(keys, pa.binary())}))
        columns = (attempt_columns(number)[0] for number in range(1, attempts + 1))
        wanted = " OR ".join(f"{column} IN (SELECT key FROM wanted)" for column in columns)
        found = database.execute(
            f"SELECT file, row_index, custom_id, count(*) OVER () FROM {parquet(index_parts)} "
            f"WHERE {wanted} ORDER BY row_id LIMIT {most}"
        ).fetchall()
    names = [_name(*row[:3]) for row in found]
    more = found[0][3] - len(found) if found else 0
    rest = f" and {more:,} more row{'s' * (more != 1)}" if more else ""
    return ", ".join(names) + rest


def try_name_rows(index_parts: Sequence[Path], keys: Sequence[bytes], spill: Path, attempts: int = 1) -> str:
    """Return text that names the input rows with some work keys, or the reason that it is not possible.

    StorageError and OutOfMemory are not raised but returned as text. `name_rows` documents the arguments.
    """
    try:
        return name_rows(index_parts, keys, spill, attempts)
    except (OSError, StorageError, OutOfMemory) as error:
        return f"{len(keys)} requests (their rows cannot be looked up: {error})"


def _name(file: str, row_index: int, custom_id: Any) -> str:
    return f"{file} row {row_index}" + (f" (id {custom_id})" if custom_id is not None else "")
