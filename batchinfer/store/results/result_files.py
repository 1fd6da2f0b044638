"""Writes the files of a result in several threads. Each thread writes the files of spans of rows.

The bytes of a file do not depend on the number of threads: row groups are split by row number within the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.filesystem.durable import DurableFile, FileOps
from batchinfer.store.outputs.frame import ERROR
from batchinfer.store.outputs.kind import OutputKind
from batchinfer.store.results.manifest import ResultFile
from batchinfer.store.results.result_rows import BATCH_ROWS

# Maximum values per row group, unless a single row has more: about 20 MB in memory
GROUP_ENTRIES = 1 << 20
SPAN_ROWS = 1 << 15  # minimum rows per span, if files have fewer
OnRows = Callable[[int], None]
T = TypeVar("T")


def spans_of(
    rows: int, rows_per_file: int, threads: int, there: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Divide the rows of a result into spans of whole files, so that several threads can write them.

    Args:
        rows: Number of rows.
        rows_per_file: Rows per file.
        threads: Number of threads. A single thread gets the longest possible spans, several threads get short
            spans.
        there: The numbers of files that exist already. Their rows are left out.

    Returns:
        The spans as (start, stop).
    """
    files = range(-(-max(1, rows) // rows_per_file))
    most = -(-SPAN_ROWS // rows_per_file) if threads > 1 else len(files)
    spans: list[range] = []
    for number in files:
        if number in there:
            continue
        if spans and spans[-1].stop == number and len(spans[-1]) < most:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
    return [(span.start * rows_per_file, min(span.stop * rows_per_file, rows)) for span in spans]


def staged_name(number: int) -> str:
    """Return the temporary name of a result file, before its generation is known.

    Args:
        number: The number of the file, from 0.
    """
    return f"{number:05d}.parquet"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A result file in the staging folder, before the result is published.

    Attributes:
        number: The number of the file in the result, from 0.
        rows: Number of rows.
        bytes: Size of the file.
        sha256: Hex digest of the file.
        errors: Number of error rows.
        retryable: Number of error rows that a retry may fix.
    """

    number: int
    rows: int
    bytes: int
    sha256: str
    errors: int
    retryable: int

    @property
    def published(self) -> ResultFile:
        """Return the manifest's entry for this file, with its temporary name."""
        return ResultFile(staged_name(self.number), self.rows, self.bytes, self.sha256)


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Writes the files of a result in several threads.

    Attributes:
        folder: The folder for the files, before the result is published.
        schema: The columns of the result.
        kind: The kind of answers.
        rows_per_file: Result rows per file. The last file may have fewer.
        ops: File operations.
        indexed_per_file: Index rows per file. It exceeds `rows_per_file` if only some samples are published.
    """

    folder: Path
    schema: pa.Schema
    kind: OutputKind
    rows_per_file: int
    ops: FileOps
    indexed_per_file: int

    def write(
        self,
        spans: Sequence[tuple[int, int]],
        tables: Callable[[int], Iterator[pa.Table]],
        threads: int,
        on_rows: OnRows,
    ) -> list[StagedFile]:
        """Write the result files of all spans, and return them. Unfinished files are removed after an error.

        Args:
            spans: The spans, as (start, stop) in rows of the index.
            tables: Returns the result rows of a span, given the number of the span.
            threads: Number of threads. If there are more threads than spans, rows are prepared in parallel
                with writing.
            on_rows: Called in the thread of the caller, with the number of rows that were written since the
                last call.

        Raises:
            Exception: The first error of any thread.
        """

        def span(number: int, heard: OnRows) -> list[StagedFile]:
            made = _prefetch(tables(number)) if threads > len(spans) else tables(number)
            return self._write_span(spans[number][0] // self.indexed_per_file, made, heard)

        return [file for files in _run_in_threads(span, len(spans), threads, on_rows) for file in files]

    def _write_span(self, first: int, tables: Iterator[pa.Table], on_rows: OnRows) -> list[StagedFile]:
        # There is at least one file, so every result has a schema
        written: list[StagedFile] = []
        writer = self._open(first)
        try:
            for group in _row_groups(_count_rows(tables, on_rows), self.rows_per_file, self.kind):
                if writer.rows == self.rows_per_file:
                    written.append(writer.finish())
                    writer = self._open(first + len(written))
                writer.write(group)
            written.append(writer.finish())
        except BaseException:
            writer.abandon()
            raise
        return written

    def _open(self, number: int) -> _ResultWriter:
        return _ResultWriter(self.folder, number, self.schema, self.ops)


class _Aborted(Exception):
    """Raised in a thread that writes a result file, if another thread failed."""


def _run_in_threads(work: Callable[[int, OnRows], T], count: int, threads: int, on_rows: OnRows) -> list[T]:
    # `on_rows` is called in the thread of the caller
    if min(threads, count) <= 1:
        return [work(number, on_rows) for number in range(count)]
    told: SimpleQueue[int | Future[T]] = SimpleQueue()
    stop = threading.Event()

    def heard(rows: int) -> None:
        if stop.is_set():
            raise _Aborted
        told.put(rows)

    with ThreadPoolExecutor(min(threads, count), "result file") as pool:
        futures = [pool.submit(work, number, heard) for number in range(count)]
        try:
            for future in futures:
                future.add_done_callback(told.put)
            _wait(told, count, on_rows)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _wait(told: SimpleQueue[int | Future[Any]], left: int, on_rows: OnRows) -> None:
    # Raises the first error
    while left:
        heard = told.get()
        if isinstance(heard, int):
            on_rows(heard)
        else:
            heard.result()
            left -= 1


def _prefetch(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    # Another thread computes the next table
    with ThreadPoolExecutor(1, "result file") as maker:
        future = maker.submit(next, tables, None)
        while (table := future.result()) is not None:
            future = maker.submit(next, tables, None)
            yield table


def _count_rows(tables: Iterator[pa.Table], on_rows: OnRows) -> Iterator[pa.Table]:
    for table in tables:
        on_rows(table.num_rows)
        yield table


def _row_groups(tables: Iterator[pa.Table], rows_per_file: int, kind: OutputKind) -> Iterator[pa.Table]:
    # Row groups depend on the rows only, not on the sizes of the tables, so equal rows give equal bytes
    held: list[pa.Table] = []
    rows = entries = in_file = 0
    for table in tables:
        each, start = kind.entries(table), 0
        while start < table.num_rows:
            ends = entries + np.cumsum(each[start : start + min(BATCH_ROWS - rows, rows_per_file - in_file)])
            taken = max(int(np.searchsorted(ends, GROUP_ENTRIES, side="right")), int(rows == 0))
            held += [table.slice(start, taken)] if taken else []
            start, rows, in_file = start + taken, rows + taken, in_file + taken
            entries = int(ends[taken - 1]) if taken else entries
            if start < table.num_rows or rows == BATCH_ROWS or in_file == rows_per_file:
                yield pa.concat_tables(held).combine_chunks()
                held, rows, entries, in_file = [], 0, 0, in_file % rows_per_file
    if held:
        yield pa.concat_tables(held).combine_chunks()


class _ResultWriter:
    def __init__(self, folder: Path, number: int, schema: pa.Schema, ops: FileOps) -> None:
        self.rows = 0
        self._number, self._errors, self._retryable = number, 0, 0
        self._file = DurableFile(folder / staged_name(number), ops)
        self._writer = pq.ParquetWriter(
            self._file, schema, compression="zstd", write_page_checksum=True, write_statistics=True
        )

    def write(self, group: pa.Table) -> None:
        self._writer.write_table(_with_own_dictionaries(group), row_group_size=group.num_rows)
        self.rows += group.num_rows
        self._errors += pc.sum(pc.equal(group.column("status"), ERROR)).as_py() or 0
        self._retryable += pc.sum(group.column("retryable")).as_py() or 0

    def finish(self) -> StagedFile:
        self._writer.close()
        digest = self._file.commit()
        counts = self._errors, self._retryable
        return StagedFile(self._number, self.rows, digest.bytes, digest.sha256, *counts)

    def abandon(self) -> None:
        self._file.abandon()


def _with_own_dictionaries(group: pa.Table) -> pa.Table:
    # Dictionaries are reduced to the values in these rows, by first occurrence, so equal rows give equal
    # bytes
    for place, column in enumerate(group.schema):
        if pa.types.is_dictionary(column.type):
            group = group.set_column(place, column, _with_own_dictionary(group.column(place)))
    return group


def _with_own_dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    shared = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    used = shared.indices.unique().drop_null()
    return pa.DictionaryArray.from_arrays(pc.index_in(shared.indices, used), shared.dictionary.take(used))
