"""Splits a stream of record batches into tables of given lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.errors import InputCorrupt


def rebatch(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Yield the rows of record batches in tables of exactly `rows` rows. The last table may be shorter.

    Each column of a table is one contiguous chunk.
    """
    return rebatch_to(batches, repeat(rows))


def rebatch_to(batches: Iterable[pa.RecordBatch], sizes: Iterator[int]) -> Iterator[pa.Table]:
    """Yield the rows of record batches in tables of the given sizes. The last table may be shorter.

    Each column of a table is one contiguous chunk.

    Args:
        batches: The record batches.
        sizes: The number of rows of each table. It must not end before the rows do.
    """
    held: list[pa.RecordBatch] = []
    count, size = 0, next(sizes)
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count < size:
            continue
        table = pa.Table.from_batches(held)
        while count >= size:
            yield table.slice(0, size).combine_chunks()
            table, count, size = table.slice(size), count - size, next(sizes)
        held = table.to_batches() if count else []
    if count:
        yield pa.Table.from_batches(held).combine_chunks()


def parquet_batches(
    paths: Sequence[Path], rows: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of Parquet files in order, at most `rows` at a time. Raises InputCorrupt for a damaged file.

    Args:
        paths: The files.
        rows: Maximum rows per batch.
        columns: The columns to read. None: all.
    """
    for path in paths:
        with _reading(path) as file:
            yield from file.iter_batches(batch_size=rows, columns=columns)


def sample_segments(path: Path, rows: int, every: int) -> Iterator[pa.Table]:
    """Divide a Parquet file into segments of `rows` rows, and yield every `every`-th segment as a table.

    The first one is segment `every // 2`, counted from 0. The last one may be shorter. Row groups that are
    not needed are not read. Raises InputCorrupt for a damaged file.
    """
    with _reading(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends, held, table = list(accumulate(sizes)), range(0), pa.table({})
        for start in range(every // 2 * rows, sum(sizes), every * rows):
            last = min(start + rows, sum(sizes)) - 1
            groups = range(bisect_right(ends, start), bisect_right(ends, last) + 1)
            if groups != held:
                held, table = groups, file.read_row_groups(groups)
            yield table.slice(start - (ends[groups[0]] - sizes[groups[0]]), rows).combine_chunks()


@contextmanager
def _reading(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise InputCorrupt(f"{path}: {error}; remove its folder to have it written again") from error


def repeat_values(values: pa.Array, times: NDArray[np.int64]) -> pa.Array:
    """Return an array in which each values[i] occurs times[i] times consecutively."""
    if (times == 1).all():
        return values
    return values.take(pa.array(np.repeat(np.arange(len(values)), times)))
