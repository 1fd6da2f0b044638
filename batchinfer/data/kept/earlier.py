"""Rows that the job's last index had under other settings: where each row that is read now stood then.

Nothing that was made of such a row is used again; but its last answer may be much like its next one.

    earlier.bin     of each row that is read, the number of an equal row of the last index, and that row's key
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.data.kept.files import OF_ROWS, KeptMarker, last_kept, opened
from batchinfer.data.kept.rows import KeptRows, KeptSource, Marks, Numbers, StretchSource
from batchinfer.data.storage.durable import TEMPORARY, DurableFile, FileOps, storage

# `row`: -1: there was none. `key`: zeros: there was none, or its tokens are those of another tokenizer
_NOTE = np.dtype([("row", "<i8"), ("key", "V32")])
_NAME = "earlier.bin"
_ROWS_READ = 1 << 16
# Rows by their places in the index: where they stood before, and their keys, null where a note has none
PLACES = pa.schema([("row_id", pa.int64()), ("place", pa.int64()), ("key", pa.binary(32))])


class EarlierRows:
    """Notes where rows stood in the last index, in the order in which they are read now."""

    def __init__(self, rows: KeptRows, file: DurableFile, same_tokens: bool, published: bool) -> None:
        """`same_tokens`: whether they were tokenised as rows are now; `published`: whether they stand in the last
        result as they stood in the index."""
        self._rows, self._file = rows, file
        self._same_tokens, self._published = same_tokens, published

    def note(self, digests: bytes, rows: int) -> None:
        """Note so many rows; without digests nobody knows where they stood. Raises StorageError."""
        notes = np.zeros(rows, _NOTE)
        found = self._rows.find(digests) if digests else np.full(rows, -1, np.int64)
        notes["row"] = found if self._published else -1
        there = np.flatnonzero(found >= 0)
        if self._same_tokens and len(there):
            notes["key"][there] = self._rows.records(found[there])["key"]
        self._file.write(notes.tobytes())

    def drain(self) -> None:
        """Let `earlier_places` read what was noted so far. Raises StorageError."""
        self._file.drain()

    def commit(self) -> None:
        """Keep what was noted, beside the index. Raises StorageError."""
        self._file.commit()


@contextmanager
def earlier_rows(
    kept: Path, marker: KeptMarker, published: float, tokenizer: str, folder: Path, ops: FileOps
) -> Iterator[EarlierRows]:
    """Open the rows of a kept index; `folder` is that of the index that is made now, and `tokenizer` the digest of its
    tokenizer. `published`: when the job's result was, in Unix time: one that is older than the kept index is of another
    run. Raises ValueError for a damaged one, OSError, StorageError."""
    is_of_result = (last_kept(kept) or 0.0) <= published
    with ExitStack() as stack:
        files = [stack.enter_context(opened(kept, one)) for one in marker.stretches]
        sources = tuple(map(_source, files))
        rows, file = KeptRows(KeptSource(sources, marker.shape)), DurableFile(folder / _NAME, ops)
        stack.callback(file.close)
        yield EarlierRows(rows, file, marker.tokenizer == tokenizer, is_of_result)


def earlier_places(folder: Path) -> pa.RecordBatchReader:
    """Read what was noted of the rows of an index, as far as they are read: of those that stood somewhere in the last
    index. Raises StorageError, in batches too."""
    return pa.RecordBatchReader.from_batches(PLACES, _batches(folder))


def _batches(folder: Path) -> Iterator[pa.RecordBatch]:
    paths = (folder / _NAME, folder / (_NAME + TEMPORARY))  # the second one while rows are read
    path = next((one for one in paths if one.is_file()), None)
    if path is None:
        return
    with storage(path, "read"), path.open("rb") as file:
        first = 0
        while len(data := file.read(_ROWS_READ * _NOTE.itemsize)) >= _NOTE.itemsize:
            notes = np.frombuffer(data[: len(data) // _NOTE.itemsize * _NOTE.itemsize], _NOTE)
            there = np.flatnonzero((notes["row"] >= 0) | _known(notes))
            yield _batch(first + there, notes[there])
            first += len(notes)


def _known(notes: NDArray[np.void]) -> Marks:
    """Return which notes have a key."""
    keys = np.ascontiguousarray(notes["key"]).view(np.uint8).reshape(len(notes), _NOTE["key"].itemsize)
    return np.asarray(keys.any(axis=1), np.bool_)


def _batch(rows: Numbers, notes: NDArray[np.void]) -> pa.RecordBatch:
    known = pa.py_buffer(np.packbits(_known(notes), bitorder="little"))
    keys = pa.py_buffer(np.ascontiguousarray(notes["key"]))
    key = pa.Array.from_buffers(PLACES.field("key").type, len(rows), [known, keys])
    return pa.record_batch([pa.array(rows), pa.array(notes["row"]), key], schema=PLACES)


def _source(files: Mapping[str, int]) -> StretchSource:
    """Return the rows of a stretch, of which each may be found: whether its answer is stored does not matter."""
    return StretchSource(tuple(files[name] for name in OF_ROWS), None)
