"""The completions of a job's rows, in the order of the rows.

The parts of a store are in the order in which the work was done. Each is read once, from its beginning to its end. What
the rows are made of is collected in runs, each sorted by row; runs for which there is no memory lie in the folder
`spill`. A batch of rows then takes its share of each run.
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
from batchinfer.store.answers.parts import damaged, padded
from batchinfer.store.results.attempts import PART_SHIFT
from batchinfer.store.results.join import Join

RUN_BYTES = 64 << 20
ROW = "row_id"
Numbers = NDArray[np.int64]


_Taken = tuple[pa.RecordBatch, Numbers]
_MOST_THREADS = 4
_SMALL = 4  # times as many rows as are read at a time are taken by a thread of its own


class _Share(NamedTuple):
    """The rows that are made of a part's answers, or of those of some of its row groups, and the positions of these
    behind the first answer, which ascend."""

    part: Path
    positions: Numbers
    rows: Numbers
    groups: range | None = None  # None: all

    @classmethod
    def of(cls, join: Join, number: int) -> _Share:
        own = join.of_part(number)
        return cls(join.parts[number], join.positions[own] - (number << PART_SHIFT), join.rows[own])

    def by_groups(self) -> Iterator[_Share]:
        """Yield the share of each row group. Raises StorageError."""
        with _opened(self.part) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = np.cumsum([0, *sizes])
        bounds = np.searchsorted(self.positions, ends)
        for group, (low, high) in enumerate(pairwise(bounds.tolist())):
            positions = self.positions[low:high] - ends[group]
            yield _Share(self.part, positions, self.rows[low:high], range(group, group + 1))


class SortedAnswers:
    """The answers of batches of rows, which several threads may ask for at once; use as a context manager.

    `starts` are the first rows of the batches, ascending. `schema` has `row_id` and the columns of completions that are
    wanted, null where a part lacks them. `at_once` is how many rows are read at a time, and `memory` how many bytes the
    runs take before they are spilled; one more is sorted beside them. Raises StorageError.
    """

    def __init__(
        self, join: Join, schema: pa.Schema, starts: Numbers, at_once: int, spill: Path, memory: int
    ) -> None:
        self._schema, self._starts, self._at_once = schema, starts, at_once
        self._spill, self._memory = spill, memory
        self._runs: list[_Run] = []
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        try:
            for batch, rows in self._reused(join):
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
        """Remove what was spilled."""
        runs, self._runs = self._runs, []
        for run in runs:
            run.close()

    def of(self, batch: int) -> pa.Table:
        """Return the answers of a batch's rows, by ascending row; rows without one are left out."""
        found = [table for run in self._runs if (table := run.of(batch)).num_rows]
        if len(found) == 1:
            return found[0]
        together = pa.concat_tables(found or [self._schema.empty_table()]).combine_chunks()
        return together.take(pa.array(np.argsort(together.column(ROW).to_numpy()))).combine_chunks()

    def _taken(self, join: Join) -> Iterator[_Taken]:
        """Yield the answers that the rows are made of, in the order of the parts. Some small parts or row groups are
        read at once."""
        ahead: deque[Future[list[_Taken]]] = deque()
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
        """Yield the shares of the parts, large ones by row groups."""
        for number in range(len(join.parts)):
            share = _Share.of(join, number)
            if len(share.rows) <= self._at_once:
                yield share
            else:
                yield from share.by_groups()

    def _of_part(self, share: _Share) -> Iterator[_Taken]:
        """Yield a share's answers, each with the row that it is of."""
        for start, batch in _batches(share.part, share.groups, self._schema, self._at_once):
            low, high = np.searchsorted(share.positions, [start, start + batch.num_rows]).tolist()
            for some in range(low, high, self._at_once):  # each of equal rows gets a copy of the answer
                wanted = slice(some, min(high, some + self._at_once))
                yield batch.take(pa.array(share.positions[wanted] - start)), share.rows[wanted]

    def _hold(self, taken: pa.RecordBatch, rows: Numbers) -> None:
        columns = [pa.array(rows) if name == ROW else taken.column(name) for name in self._schema.names]
        self._held.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._held_bytes += self._held[-1].nbytes
        if self._held_bytes >= RUN_BYTES:
            self._close_run()

    def _close_run(self) -> None:
        """Sort what is held by row, and keep it where there is memory for it."""
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
    """Answers sorted by row."""

    def of(self, batch: int) -> pa.Table:
        """Return the share of a batch."""

    def close(self) -> None:
        """Give back what it holds."""


class _InMemory:
    """Answers as they were read, and the order of their rows, so that who wants a share sorts it: several threads do so
    at once. `ends` has the place in that order of each batch's first row, and the end."""

    def __init__(self, table: pa.Table, order: Numbers, ends: Numbers) -> None:
        self._table, self._order, self._ends = table, order, ends

    def of(self, batch: int) -> pa.Table:
        share = self._order[int(self._ends[batch]) : int(self._ends[batch + 1])]
        return self._table.take(pa.array(share)).combine_chunks()

    def close(self) -> None:
        self._table = self._table.schema.empty_table()


class _Spilled:
    """A file with the share of each batch as a batch of its own."""

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


def _at_once(
    file: pq.ParquetFile, groups: Sequence[int], rows: int, names: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file's row groups, at most so many at a time. A thousand files of a thousand rows take 0.6 s
    where each is read as a whole, and 1.4 s in batches."""
    if sum(file.metadata.row_group(group).num_rows for group in groups) > rows:
        yield from file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False)
        return
    yield from file.read_row_groups(groups, names, use_threads=False).combine_chunks().to_batches()


def _batches(
    part: Path, groups: range | None, schema: pa.Schema, at_once: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part's row groups with the number of the first, in all columns of `schema` but ROW; None: all
    groups. Raises StorageError."""
    start, wanted = 0, schema.remove(schema.get_field_index(ROW))
    with _opened(part) as file:
        there = set(file.schema_arrow.names)
        names = [name for name in wanted.names if name in there]
        for batch in _at_once(file, groups or range(file.num_row_groups), at_once, names):
            yield start, padded(batch, wanted)
            start += batch.num_rows


@contextmanager
def _opened(part: Path) -> Iterator[pq.ParquetFile]:
    """Open a part of the store. Raises StorageError, also for what is found to be damaged within the block."""
    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise damaged(part, error) from error
