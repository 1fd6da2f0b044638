"""The figures of a published result sum up its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.filesystem.duck import connection, naming_errors, parquet


def summed_up(files: Sequence[Path], figures: Mapping[str, str], spill: Path) -> dict[str, Any]:
    """Return figures of a result's rows with an answer, by name.

    Args:
        files: The files of the result.
        figures: A DuckDB aggregate over the table `answered` for each name.
        spill: Folder for data that does not fit into memory.

    Raises:
        StorageError: A file cannot be read.
        OutOfMemory: The figures need more memory than there is.
    """
    if not figures:
        return {}
    with connection(spill) as database, naming_errors(files[0].parent):
        database.execute(f"CREATE VIEW answered AS FROM {parquet(files)} WHERE status = 'ok'")
        columns = ", ".join(f"{sql} AS {name}" for name, sql in figures.items())
        (row,) = database.execute(f"SELECT {columns} FROM answered").fetchall()
    return dict(zip(figures, row, strict=True))
