"""Sorts the completions of a job's rows by row.

The parts of a store are in the order of computation. Each is read once from start to end. Needed completions are
collected in runs, and each run is sorted by row. Runs that exceed the memory are written to the folder `spill`. A batch
of rows then reads its share of each run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import storage
from batchinfer.machine.cpus import usable_cpus
from batchinfer.store.answers.parts import damaged_part, pad_columns
from batchinfer.store.results.attempts import PART_SHIFT
from batchinfer.store.results.join import Join

RUN_BYTES = 64 << 20
ROW = "row_id"
Numbers = NDArray[np.int64]


_Answers = tuple[pa.RecordBatch, Numbers]
_MOST_THREADS = 4
_SMALL = 4  # shares of up to 4 times `at_once` rows are read by a thread of their own


class _Share(NamedTuple):
    part: Path
    positions: Numbers
    rows: Numbers
    groups: range | None = None

    @classmethod
    def of(cls, join: Join, number: int) -> _Share:
        own = join.of_part(number)
        return cls(join.parts[number], join.positions[own] - (number << PART_SHIFT), join.rows[own])

    def by_groups(self) -> Iterator[_Share]:
        with _open_part(self.part) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = np.cumsum([0, *sizes])
        bounds = np.searchsorted(self.positions, ends)
        for group, (low, high) in enumerate(pairwise(bounds.tolist())):
            positions = self.positions[low:high] - ends[group]
            yield _Share(self.part, positions, self.rows[low:high], range(group, group + 1))


class SortedAnswers:
    """The completions of batches of index rows, sorted by row.

    It is a context manager. Several threads may read batches.
    """

    def __init__(
        self, join: Join, schema: pa.Schema, starts: Numbers, at_once: int, spill: Path, memory: int
    ) -> None:
        """Read the completions of all rows from the store, and sort them by row.

        Args:
            join: The positions of the completions.
            schema: `row_id` and the columns of completions to read. A column is null for parts that lack it.
            starts: The first row of each batch, ascending.
            at_once: Maximum rows to read at a time.
            spill: Folder for sorted completions that exceed the memory.
            memory: Bytes of sorted completions to keep in memory.

        Raises:
            StorageError: A part cannot be read, or a file cannot be written.
        """
        self._schema, self._starts, self._at_once = schema, starts, at_once
        self._spill, self._memory = spill, memory
        self._runs: list[_Run] = []
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        try:
            for batch, rows in self._read_answers(join):
                self._hold(batch, rows)
            self._close_run()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SortedAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary files with completions."""
        runs, self._runs = self._runs, []
        for run in runs:
            run.close()

    def of(self, batch: int) -> pa.Table:
        """Return the completions of the rows in a batch, in row order.

        Rows without a completion are left out.

        Args:
            batch: The number of the batch, from 0.
        """
        found = [table for run in self._runs if (table := run.of(batch)).num_rows]
        if len(found) == 1:
            return found[0]
        together = pa.concat_tables(found or [self._schema.empty_table()]).combine_chunks()
        return together.take(pa.array(np.argsort(together.column(ROW).to_numpy()))).combine_chunks()

    def _read_answers(self, join: Join) -> Iterator[_Answers]:
        # Small shares are read in parallel
        ahead: deque[Future[list[_Answers]]] = deque()
        with ThreadPoolExecutor(threads := min(_MOST_THREADS, usable_cpus()), "answers") as pool:
            try:
                for share in self._shares(join):
                    small = len(share.rows) <= _SMALL * self._at_once
                    while ahead and (len(ahead) > 2 * threads or not small):
                        yield from ahead.popleft().result()
                    if not small:
                        yield from self._of_part(share)
                    elif len(share.rows):
                        ahead.append(pool.submit(lambda one: [*self._of_part(one)], share))
                for one in ahead:
                    yield from one.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _shares(self, join: Join) -> Iterator[_Share]:
        # Parts from which many rows are needed are split by row groups
        for number in range(len(join.parts)):
            share = _Share.of(join, number)
            if len(share.rows) <= self._at_once:
                yield share
            else:
                yield from share.by_groups()

    def _of_part(self, share: _Share) -> Iterator[_Answers]:
        for start, batch in _batches(share.part, share.groups, self._schema, self._at_once):
            low, high = np.searchsorted(share.positions, [start, start + batch.num_rows]).tolist()
            for some in range(low, high, self._at_once):  # rows with equal keys each get a copy
                wanted = slice(some, min(high, some + self._at_once))
                yield batch.take(pa.array(share.positions[wanted] - start)), share.rows[wanted]

    def _hold(self, taken: pa.RecordBatch, rows: Numbers) -> None:
        columns = [pa.array(rows) if name == ROW else taken.column(name) for name in self._schema.names]
        self._held.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._held_bytes += self._held[-1].nbytes
        if self._held_bytes >= RUN_BYTES:
            self._close_run()

    def _close_run(self) -> None:
        if not self._held:
            return
        table, size = pa.Table.from_batches(self._held).combine_chunks(), self._held_bytes
        self._held, self._held_bytes = [], 0
        rows = table.column(ROW).to_numpy()
        order = np.argsort(rows)
        ends = np.append(np.searchsorted(rows[order], self._starts), len(rows))
        self._memory -= size + order.nbytes
        if self._memory >= 0:
            self._runs.append(_InMemory(table, order, ends))
        else:
            path = self._spill / f"run-{len(self._runs):05d}.arrow"
            self._runs.append(_Spilled(table.take(pa.array(order)).combine_chunks(), ends, path))


class _Run(Protocol):
    """Completions sorted by row, in memory or in a file."""

    def of(self, batch: int) -> pa.Table:
        """Return the completions of the rows in the batch with this number."""

    def close(self) -> None:
        """Release the memory of the completions, or remove their file."""


class _InMemory:
    # `order` sorts the completions by row; each reader sorts the rows of its batch, so sorting is parallel.
    # `ends` has the position in this order of each batch's first row, and the number of completions at the
    # end
    def __init__(self, table: pa.Table, order: Numbers, ends: Numbers) -> None:
        self._table, self._order, self._ends = table, order, ends

    def of(self, batch: int) -> pa.Table:
        share = self._order[int(self._ends[batch]) : int(self._ends[batch + 1])]
        return self._table.take(pa.array(share)).combine_chunks()

    def close(self) -> None:
        self._table = self._table.schema.empty_table()


class _Spilled:
    """Completions in an Arrow file, with a record batch for each batch of rows."""

    def __init__(self, table: pa.Table, ends: Numbers, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        with storage(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_file(file, table.schema, options=options) as out,
            ):
                for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                    out.write_batch(_one_batch(table.slice(start, end - start)))
        with storage(path, "read"):
            self._file = pa.OSFile(str(path), "rb")
            self._reader = pa.ipc.open_file(self._file)

    def of(self, batch: int) -> pa.Table:
        with self._lock, storage(self._path, "read"):
            return pa.Table.from_batches([self._reader.get_batch(batch)])

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return next(iter(table.to_batches()), pa.RecordBatch.from_pylist([], table.schema))


def _small_batches(
    file: pq.ParquetFile, groups: Sequence[int], rows: int, names: list[str]
) -> Iterator[pa.RecordBatch]:
    # Small files are read as a whole: a thousand files of a thousand rows take 0.6 s, and 1.4 s in batches
    if sum(file.metadata.row_group(group).num_rows for group in groups) > rows:
        yield from file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False)
        return
    yield from file.read_row_groups(groups, names, use_threads=False).combine_chunks().to_batches()


def _batches(
    part: Path, groups: range | None, schema: pa.Schema, at_once: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    start, wanted = 0, schema.remove(schema.get_field_index(ROW))
    with _open_part(part) as file:
        there = set(file.schema_arrow.names)
        names = [name for name in wanted.names if name in there]
        for batch in _small_batches(file, groups or range(file.num_row_groups), at_once, names):
            yield start, pad_columns(batch, wanted)
            start += batch.num_rows


@contextmanager
def _open_part(part: Path) -> Iterator[pq.ParquetFile]:
    # Also converts errors of damage that is found within the block
    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise damaged_part(part, error) from error
