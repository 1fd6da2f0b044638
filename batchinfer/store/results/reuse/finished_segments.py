"""Selects segments that can be reused whole, and records the segments of this run for the next one.

The kept index (`store/kept`) has the prepared rows. After they are published, links to the parts of the index and the
positions of the answers are added to it. The parts still have token offsets, which are invalid for reused rows and
never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import Digest, FileOps, storage
from batchinfer.store.index.index import Index
from batchinfer.store.index.reused_rows import CARRIED, INDEX
from batchinfer.store.kept.finished import (
    FAILED,
    FAILED_TYPE,
    POSITION_TYPE,
    POSITIONS,
    FinishedMarker,
    FinishedSegment,
    is_still_valid,
    link_file,
    read_finished,
    write_finished,
    write_numbers,
)
from batchinfer.store.results.attempts import PART_SHIFT, Numbers
from batchinfer.store.results.join import ROW_IN_PART, Join

_NONE = -1  # the row has no answer


@dataclass(frozen=True, slots=True)
class FinishedSegments:
    """Selects the segments of a kept index whose index rows and answers this run can reuse.

    An object is called like a function.

    Attributes:
        kept: The folder of the kept index.
        parts: The parts of the store.
        retry_errors: True if rows with retryable errors must run again.
        notice: Called with a message if the record of finished segments cannot be read.
    """

    kept: Path
    parts: Sequence[Path]
    retry_errors: bool
    notice: Callable[[str], None]

    def __call__(self, identity: str, folders: Sequence[str]) -> list[FinishedSegment]:
        """Return the leading segments of the kept index that can be reused.

        Their rows must have these settings, and the store must still have all their answers.

        Args:
            identity: The hash of the settings.
            folders: The folders of the segments, in row order.
        """
        try:
            marker = read_finished(self.kept)
        except (ValueError, OSError) as error:
            self.notice(f"unchanged files cannot be reused and are read again: {error}")
            return []
        if marker is None or marker.identity != identity:
            return []
        names, found = {part.name for part in self.parts}, list[FinishedSegment]()
        for one in marker.leading(folders):
            if not is_still_valid(one, marker.seen, names) or (self.retry_errors and one.failed[1]):
                break
            found.append(one)
        return found


def record_finished(kept: Path, index: Index, join: Join, ops: FileOps) -> None:
    """Record the segments of a published index as finished.

    The next run can then reuse their index rows and answers.

    Args:
        kept: The folder of the kept index.
        index: The index. Nothing is recorded if this run wrote no segments.
        join: The positions of the answers of its rows.
        ops: File operations.

    Raises:
        StorageError: A file cannot be written.
        InputCorrupt: A part is damaged.
    """
    if index.segments is None or not join.reused_unchanged:
        return
    found = [one.segment for one in index.reused.segments]
    settling = _Recorder(kept, index, join, ops)
    for folder, rows in index.segments.rows:
        found.append(settling.next(folder, rows, found[-1].folder if found else ""))
    seen = tuple(part.name for part in join.parts)
    write_finished(kept, FinishedMarker(index.segments.identity, tuple(found), seen), ops)


class _Recorder:
    def __init__(self, kept: Path, index: Index, join: Join, ops: FileOps) -> None:
        self._kept, self._join, self._ops = kept, join, ops
        self._start = index.reused.rows
        self._parts = iter(index.index_parts[len(index.reused.parts) :])
        self._carried = iter(index.passthrough_parts[len(index.reused.carried) :])
        self._is_carried = bool(index.passthrough_parts)
        self._places: Numbers = np.full(index.rows, _NONE, np.int64)
        self._places[join.rows] = join.positions
        # The first row of each key; rows with equal keys have the same position
        self._firsts = (
            np.minimum.reduceat(join.rows, _begins(join.positions)) if len(join.rows) else join.rows
        )

    def next(self, folder: str, rows: int, before: str) -> FinishedSegment:
        # Links the index parts of the segment into the kept index, and writes the positions of the answers
        start, end, files = self._start, self._start + rows, dict[str, Digest]()
        self._start = end
        errors = np.zeros(2, np.int64)
        keys: list[bytes] = []
        for number, part in enumerate(_of_rows(self._parts, rows)):
            name = f"{INDEX}-{number:05d}.parquet"
            files[name] = link_file(part, self._kept / folder / name, self._ops)
            table = _keys(part)
            bad = table.filter(pc.is_null(table["key"]))
            errors += [len(bad), pc.sum(bad["retryable"]).as_py() or 0]
            keys += self._failed_keys(table)
        for number, part in enumerate(_of_rows(self._carried, rows) if self._is_carried else ()):
            name = f"{CARRIED}-{number:05d}.parquet"
            files[name] = link_file(part, self._kept / folder / name, self._ops)
        store, places = self._used(start, end)
        failed, again = self._failed(start, end)
        listed = np.zeros(len(failed), FAILED_TYPE)
        listed["row"], listed["key"] = failed, np.frombuffer(b"".join(keys), "V32")
        for name, numbers in ((POSITIONS, places.astype(POSITION_TYPE)), (FAILED, listed)):
            files[name] = write_numbers(self._kept / folder / name, numbers, self._ops)
        counts = (int(errors[0]), int(errors[1])), (len(failed), int(np.count_nonzero(again)))
        distinct = int(np.count_nonzero(self._firsts < end))
        return FinishedSegment(folder, before, rows, distinct, *counts, store, files)

    def _failed(self, start: int, end: int) -> tuple[Numbers, NDArray[np.bool_]]:
        some = slice(*np.searchsorted(self._join.failed, [start, end]).tolist())
        return self._join.failed[some], self._join.again[some]

    def _failed_keys(self, table: pa.Table) -> list[bytes]:
        if not len(table):
            return []
        first = table["row_id"][0].as_py()
        failed, _ = self._failed(first, first + len(table))
        return [key.as_py() for key in table["key"].take(pa.array(failed - first))]

    def _used(self, start: int, end: int) -> tuple[tuple[str, ...], Numbers]:
        # Part numbers in the returned positions are indices into the returned parts
        places = self._places[start:end]
        there = places >= 0
        numbers, which = np.unique(places[there] >> PART_SHIFT, return_inverse=True)
        own = np.full(len(places), _NONE, np.int64)
        own[there] = (which.astype(np.int64) << PART_SHIFT) + (places[there] & ROW_IN_PART)
        return tuple(self._join.parts[number].name for number in numbers.tolist()), own


def _begins(positions: Numbers) -> Numbers:
    return np.flatnonzero(np.diff(positions, prepend=_NONE))


def _of_rows(parts: Iterator[Path], rows: int) -> Iterator[Path]:
    # Segments end at the end of a part
    while rows > 0:
        part = next(parts)
        rows -= pq.read_metadata(part).num_rows
        yield part
    assert rows == 0, "a part has rows of two segments"


def _keys(part: Path) -> pa.Table:
    with storage(part, "read"), pq.ParquetFile(part, page_checksum_verification=True) as file:
        return file.read(["row_id", "key", "retryable"])
