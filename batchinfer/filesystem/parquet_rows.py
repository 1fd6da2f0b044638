"""Reads ranges of rows from Parquet files, numbered over all files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputCorrupt


class ParquetRows:
    """Reads ranges of rows of several Parquet files. Rows are numbered from 0 across all files.

    Several threads may read at the same time. Methods raise InputCorrupt for a damaged file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._ends: list[int] = np.cumsum([_count(path) for path in paths]).tolist()

    @property
    def rows(self) -> int:
        """Return the number of rows in all Parquet files."""
        return self._ends[-1] if self._ends else 0

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the first Parquet file, or an empty schema if there are no files."""
        try:
            return pq.read_schema(self._paths[0]) if self._paths else pa.schema([])
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(self._paths[0], error) from error

    def batches(
        self, start: int, stop: int, rows: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `start` up to, not including, `stop`, at most `rows` at a time.

        Args:
            start: The number of the first row across all files.
            stop: The number of the row after the last one.
            rows: Maximum rows per batch.
            columns: The columns to read. None: all.
        """
        first = 0
        for path, end in zip(self._paths, self._ends, strict=True):
            if first < stop and start < end:
                yield from _within(path, max(start - first, 0), stop - first, rows, columns)
            first = end


def _count(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, error) from error


def _within(
    path: Path, start: int, stop: int, rows: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            at, groups = _groups(file.metadata, start, stop)
            for batch in file.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False):
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    yield batch.slice(low, high - low)
                at += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, error) from error


def _groups(found: pq.FileMetaData, start: int, stop: int) -> tuple[int, list[int]]:
    ends = np.cumsum([0, *(found.row_group(number).num_rows for number in range(found.num_row_groups))])
    groups = np.flatnonzero((ends[1:] > start) & (ends[:-1] < stop)).tolist()
    return int(ends[groups[0]]) if groups else 0, groups


def _damaged(path: Path, error: Exception) -> InputCorrupt:
    return InputCorrupt(f"{path}: {error}; remove its folder to have it written again")
