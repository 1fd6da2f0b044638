"""The files of a result, which several threads write at once: each the files of some spans of rows.

No byte of a file depends on the number of threads: row groups are cut by a file's own rows.
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

# Of one row group, unless a single row has more: 20 MB in memory
GROUP_ENTRIES = 1 << 20
SPAN_ROWS = 1 << 15  # at least, where files have fewer
OnRows = Callable[[int], None]
T = TypeVar("T")


def spans_of(
    rows: int, rows_per_file: int, threads: int, there: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Cut the rows of a result at the ends of files, but for those of the files that are `there`: one span for one
    thread, for several as many as there can be."""
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
    """Return what the file with this number is called until it has its generation's name."""
    return f"{number:05d}.parquet"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that was written, and how many of its rows are errors, and retryable ones."""

    number: int
    rows: int
    bytes: int
    sha256: str
    errors: int
    retryable: int

    @property
    def published(self) -> ResultFile:
        """Return what the manifest says of it."""
        return ResultFile(staged_name(self.number), self.rows, self.bytes, self.sha256)


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """The files that a result's rows go to: `rows_per_file` rows each, the last may have fewer."""

    folder: Path
    schema: pa.Schema
    kind: OutputKind
    rows_per_file: int
    ops: FileOps
    indexed_per_file: int  # rows of the index, of which these are made

    def write(
        self,
        spans: Sequence[tuple[int, int]],
        tables: Callable[[int], Iterator[pa.Table]],
        threads: int,
        on_rows: OnRows,
    ) -> list[StagedFile]:
        """Write the files of all spans; `tables` gives the rows of the span with that number. Where there are more
        threads than spans, rows are made while others are written. `on_rows` is called in this thread. Raises what
        fails first, and leaves no file that is written still."""

        def span(number: int, heard: OnRows) -> list[StagedFile]:
            made = _ahead(tables(number)) if threads > len(spans) else tables(number)
            return self._write_span(spans[number][0] // self.indexed_per_file, made, heard)

        return [file for files in _at_once(span, len(spans), threads, on_rows) for file in files]

    def _write_span(self, first: int, tables: Iterator[pa.Table], on_rows: OnRows) -> list[StagedFile]:
        """Write the files from the `first` on: at least one, so that the schema is always there."""
        written: list[StagedFile] = []
        writer = self._open(first)
        try:
            for group in _row_groups(_told(tables, on_rows), self.rows_per_file, self.kind):
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


class _GivenUp(Exception):
    """Raised in a thread whose work is of no use any more."""


def _at_once(work: Callable[[int, OnRows], T], count: int, threads: int, on_rows: OnRows) -> list[T]:
    """Do the work with the numbers below `count`; what it says of rows is told to `on_rows` in this thread."""
    if min(threads, count) <= 1:
        return [work(number, on_rows) for number in range(count)]
    told: SimpleQueue[int | Future[T]] = SimpleQueue()
    stop = threading.Event()

    def heard(rows: int) -> None:
        if stop.is_set():
            raise _GivenUp
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
    """Return when all work is done. Raises what fails first."""
    while left:
        heard = told.get()
        if isinstance(heard, int):
            on_rows(heard)
        else:
            heard.result()
            left -= 1


def _ahead(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the tables; the next one is made by a thread of its own meanwhile."""
    with ThreadPoolExecutor(1, "result file") as maker:
        future = maker.submit(next, tables, None)
        while (table := future.result()) is not None:
            future = maker.submit(next, tables, None)
            yield table


def _told(tables: Iterator[pa.Table], on_rows: OnRows) -> Iterator[pa.Table]:
    for table in tables:
        on_rows(table.num_rows)
        yield table


def _row_groups(tables: Iterator[pa.Table], rows_per_file: int, kind: OutputKind) -> Iterator[pa.Table]:
    """Row groups cut by the rows alone, so that equal rows give equal bytes however they arrive: BATCH_ROWS each, or
    fewer where they have GROUP_ENTRIES values besides."""
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
    """One staged Parquet file; the footer is written only by `finish`, the file given up by any exception."""

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
    """Dictionaries of just the values in these rows, in the order of their first: equal rows give equal bytes."""
    for place, column in enumerate(group.schema):
        if pa.types.is_dictionary(column.type):
            group = group.set_column(place, column, _with_own_dictionary(group.column(place)))
    return group


def _with_own_dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    shared = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    used = shared.indices.unique().drop_null()
    return pa.DictionaryArray.from_arrays(pc.index_in(shared.indices, used), shared.dictionary.take(used))
