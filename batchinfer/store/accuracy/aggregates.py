"""Computes aggregates of a published result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.filesystem.duck import connection, parquet, translate_errors


def summarise(files: Sequence[Path], aggregates: Mapping[str, str], spill: Path) -> dict[str, Any]:
    """Compute aggregates over the rows of a result that have an answer, and return their values by name.

    Args:
        files: The Parquet files of the result.
        aggregates: A DuckDB aggregate by name, such as {"mean": "avg(score)"}, over the columns of the result.
        spill: Folder for data that does not fit into memory.

    Raises:
        StorageError: A file cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    if not aggregates:
        return {}
    with connection(spill) as database, translate_errors(files[0].parent):
        database.execute(f"CREATE VIEW answered AS FROM {parquet(files)} WHERE status = 'ok'")
        columns = ", ".join(f"{sql} AS {name}" for name, sql in aggregates.items())
        (row,) = database.execute(f"SELECT {columns} FROM answered").fetchall()
    return dict(zip(aggregates, row, strict=True))
