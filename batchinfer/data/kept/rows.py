"""The rows of a kept index: for each a record of fixed size, found again by the row's digest.

    rows.bin    the records, in the order of the rows
    words.bin   the first 8 bytes of all digests, sorted
    order.bin   the number of the row of each of these
    params.bin  the texts of parameters and tools that the records point to, end to end
    ids.bin     the rows' ids, end to end
    id_ends.bin where each of these ends, behind a zero
    runs.bin    for each run of rows the rest of its digest, its first row, and how many it has
    run_words.bin  the first 8 bytes of their digests; both files in the order of these

All are mapped into memory, and looked up many at a time: what is not looked at takes no memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.data.input.digests.row_digest import DIGEST_BYTES
from batchinfer.data.kept.record_shape import RecordShape

Numbers = NDArray[np.int64]
Marks = NDArray[np.bool_]
Records = NDArray[np.void]
ORDER_TYPE = np.dtype("<u4")
RUN_TYPE = np.dtype([("rest", "<u8"), ("first", "<u4"), ("rows", "<u4")])
_WORDS = DIGEST_BYTES // 8
_KEY, KEY_BYTES = "V32", 32
SAMPLE_KEYS = "sample_keys"  # those of the samples behind the first
SEVERAL = 2
_BLOCK = 1 << 16  # records that are read at once


def attempt_names(attempt: int) -> tuple[str, str, str, str]:
    """Return the fields of a record with the key of an attempt, where the text of its parameters is and how long, and
    its max_tokens. The length is 0 where a row has no such attempt."""
    end = "" if attempt == 1 else f"_{attempt}"
    return f"key{end}", f"params_at{end}", f"params_size{end}", f"most{end}"


def record_type(shape: RecordShape) -> np.dtype[np.void]:
    """Return the type of a record. `sampled` is 0 for greedy work, 1 for a sampled answer, SEVERAL for more of them.
    Where a row has no tools their size is 0. An error row has the count 0, and a digest
    of zeros: it is never found."""
    fields = [("word", "<u8"), ("rest", "<u8"), ("count", "<i4"), ("opening", "i1"), ("sampled", "i1")]
    fields += [("has_id", "i1")]
    fields += [("tools_at", "<i8"), ("tools_size", "<i4")]
    for attempt in range(1, shape.attempts + 1):
        names = attempt_names(attempt)
        fields += zip(names, (_KEY, "<i8", "<i4", "<i4"), strict=True)
    if shape.samples > 1:
        fields += [(SAMPLE_KEYS, f"V{KEY_BYTES * (shape.samples - 1)}")]
    return np.dtype(fields)


@dataclass(frozen=True, slots=True)
class StretchSource:
    """The files of a stretch's rows (OF_ROWS) as another process gets them: by their descriptors, which it has by the
    same numbers.

    `usable` is a file with one byte a row: whether the row needs no tokens. None: all do not that have a digest.
    """

    of_rows: tuple[int, ...]
    usable: int | None

    @property
    def files(self) -> tuple[int, ...]:
        """Return the descriptors."""
        return self.of_rows if self.usable is None else (*self.of_rows, self.usable)


@dataclass(frozen=True, slots=True)
class KeptSource:
    """All kept rows as another process gets them."""

    stretches: tuple[StretchSource, ...]
    shape: RecordShape

    @property
    def files(self) -> tuple[int, ...]:
        """Return the descriptors of all files."""
        return tuple(file for one in self.stretches for file in one.files)


class KeptRows:
    """The rows of a kept index, in any process. They are numbered over all stretches."""

    def __init__(self, source: KeptSource) -> None:
        self.shape = source.shape
        self._stretches = [_StretchRows(one, source.shape) for one in source.stretches]
        self._firsts = np.cumsum([0, *(len(one.records) for one in self._stretches)], dtype=np.int64)
        self._texts: list[int] = np.cumsum([0, *(len(one.params) for one in self._stretches)]).tolist()

    def find(self, digests: bytes) -> Numbers:
        """Return the numbers of the usable rows with these digests, -1 where there is none."""
        words = np.frombuffer(digests, "<u8").reshape(-1, _WORDS)
        found = np.full(len(words), -1, np.int64)
        for first, stretch in zip(self._firsts.tolist(), self._stretches, strict=False):
            open_ = np.flatnonzero(found < 0)
            places = stretch.find(words[open_])
            found[open_] = np.where(places < 0, -1, places + first)
        return found

    def find_runs(self, digests: bytes) -> tuple[Numbers, Numbers]:
        """Return the numbers of the first rows of the runs with these digests, -1 where there is none or not all of its
        rows are usable; and how many rows each has."""
        words = np.frombuffer(digests, "<u8").reshape(-1, _WORDS)
        found, sizes = np.full(len(words), -1, np.int64), np.zeros(len(words), np.int64)
        for first, stretch in zip(self._firsts.tolist(), self._stretches, strict=False):
            open_ = np.flatnonzero(found < 0)
            places, rows = stretch.find_runs(words[open_])
            found[open_] = np.where(places < 0, -1, places + first)
            sizes[open_] = rows
        return found, sizes

    def records(self, rows: Numbers) -> Records:
        """Return the records of the rows with these numbers. Their texts are numbered over all stretches, too."""
        found = np.zeros(len(rows), record_type(self.shape))
        which = np.searchsorted(self._firsts, rows, side="right") - 1
        for number in np.unique(which).tolist():
            mine = which == number
            taken = self._stretches[number].records[rows[mine] - self._firsts[number]]
            for name in (
                *(attempt_names(attempt)[1] for attempt in range(1, self.shape.attempts + 1)),
                "tools_at",
            ):
                taken[name] += self._texts[number]
            found[mine] = taken
        return found

    def ids(self, rows: Numbers) -> pa.StringArray:
        """Return the ids of the rows with these numbers."""
        which = np.searchsorted(self._firsts, rows, side="right") - 1
        parts, places = [pa.array([], pa.string())], [np.empty(0, np.int64)]
        for number in np.unique(which).tolist():
            mine = np.flatnonzero(which == number)
            parts.append(self._stretches[number].ids(rows[mine] - self._firsts[number]))
            places.append(mine)
        return pa.concat_arrays(parts).take(pa.array(np.argsort(np.concatenate(places))))

    def text(self, at: int, size: int) -> str:
        """Return the text of parameters, or of tools."""
        number = bisect_right(self._texts, at) - 1
        start = at - self._texts[number]
        return bytes(self._stretches[number].params[start : start + size]).decode()


class _StretchRows:
    """The rows of a stretch."""

    def __init__(self, source: StretchSource, shape: RecordShape) -> None:
        rows, words, order, self.params, ids, id_ends, runs, run_words = map(mapped, source.of_rows)
        self.records: Records = np.frombuffer(rows, record_type(shape))
        self._words, self._order = np.frombuffer(words, "<u8"), np.frombuffer(order, ORDER_TYPE)
        self._usable = None if source.usable is None else np.frombuffer(mapped(source.usable), np.bool_)
        self._runs, self._run_words = np.frombuffer(runs, RUN_TYPE), np.frombuffer(run_words, "<u8")
        texts = [pa.py_buffer(id_ends), pa.py_buffer(ids)]
        self._ids = pa.LargeStringArray.from_buffers(len(self.records), *texts) if len(self.records) else None

    def ids(self, rows: Numbers) -> pa.StringArray:
        """Return the ids of the rows with these numbers."""
        assert self._ids is not None, "there are no rows"
        nulls = self.records["has_id"][rows] == 0
        return pc.if_else(pa.array(nulls), None, self._ids.take(pa.array(rows)).cast(pa.string()))

    def find(self, words: NDArray[np.uint64]) -> Numbers:
        """Return the numbers of the usable rows with digests of these words, -1 where there is none."""
        found = np.full(len(words), -1, np.int64)
        if not len(self._words) or not len(words):
            return found
        places = np.minimum(np.searchsorted(self._words, words[:, 0]), len(self._words) - 1)
        rows = self._order[places].astype(np.int64)
        records = self.records
        same = (self._words[places] == words[:, 0]) & (records["rest"][rows] == words[:, 1])
        same &= words.any(axis=1) & (True if self._usable is None else self._usable[rows])
        found[same] = rows[same]
        return found

    def find_runs(self, words: NDArray[np.uint64]) -> tuple[Numbers, Numbers]:
        """Return the first rows of the runs with digests of these words, -1 where there is none or not all of its rows
        are usable; and how many rows each has, 0 where there is none."""
        found, sizes = np.full(len(words), -1, np.int64), np.zeros(len(words), np.int64)
        if not len(self._run_words) or not len(words):
            return found, sizes
        places = np.minimum(np.searchsorted(self._run_words, words[:, 0]), len(self._run_words) - 1)
        runs = self._runs[places]
        there = (self._run_words[places] == words[:, 0]) & (runs["rest"] == words[:, 1]) & words.any(axis=1)
        if self._usable is not None and there.any():
            rows = runs["rows"][there].astype(np.int64)
            starts = np.cumsum(rows) - rows
            own = np.repeat(runs["first"][there] - starts, rows) + np.arange(int(rows.sum()))
            there[there] = np.logical_and.reduceat(self._usable[own], starts)
        found[there], sizes[there] = runs["first"][there], runs["rows"][there]
        return found, sizes


@contextmanager
def file_of(marks: Marks) -> Iterator[int]:
    """Write marks to a file without a name, which is there within the block."""
    with tempfile.TemporaryFile() as file:
        file.write(marks.tobytes())
        file.flush()
        yield file.fileno()


def mapped(file: int) -> Any:
    """Return the bytes of an open file without reading them."""
    size = os.fstat(file).st_size
    return mmap.mmap(file, size, prot=mmap.PROT_READ) if size else b""


def record_blocks(file: int, shape: RecordShape) -> Iterator[Records]:
    """Yield all records of an open file, some at a time. They are read, not mapped: a disk that fails does not kill
    this process."""
    kind, at = record_type(shape), 0
    while block := os.pread(file, _BLOCK * kind.itemsize, at):
        yield np.frombuffer(block, kind)
        at += len(block)


def whole_file(file: int) -> bytes:
    """Return the bytes of an open file."""
    size = os.fstat(file).st_size
    return b"".join(iter_pieces(file, 0, size))


def iter_pieces(file: int, at: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of an open file from `at` on, as the system gives them."""
    while size > 0 and (piece := os.pread(file, size, at)):
        yield piece
        at, size = at + len(piece), size - len(piece)


def sorted_runs(
    digests: Sequence[bytes], firsts: Numbers, rows: Numbers
) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
    """Return the first words of the digests of runs sorted, and what else is kept of each, in this order."""
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, _WORDS)
    order = np.argsort(words[:, 0], kind="stable")
    found = np.zeros(len(order), RUN_TYPE)
    found["rest"], found["first"], found["rows"] = words[order, 1], firsts[order], rows[order]
    return words[order, 0], found


def sorted_words(words: Sequence[NDArray[np.uint64]]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Return the first words of all digests sorted, and the row of each. Ten million take 240 MB for a moment."""
    together = np.concatenate([np.empty(0, np.uint64), *words])
    order = np.argsort(together, kind="stable")
    return together[order], order.astype(ORDER_TYPE)
