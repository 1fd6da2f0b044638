"""Rows that the job's last index had under other settings: where each row that is read now stood then.

Nothing that was made of such a row is used again; but its last answer may be much like its next one.

    earlier.bin     of each row that is read, the number of an equal row of the last index, and that row's key
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from batchinfer.data.kept.files import OF_ROWS, KeptMarker, opened
from batchinfer.data.kept.rows import KeptRows, KeptSource, Numbers, StretchSource
from batchinfer.data.storage.durable import TEMPORARY, DurableFile, FileOps, storage

# `row`: -1: there was none. `key`: zeros: there was none, or its tokens are those of another tokenizer
_NOTE = np.dtype([("row", "<i8"), ("key", "V32")])
_NAME = "earlier.bin"


class EarlierRows:
    """Notes where rows stood in the last index, in the order in which they are read now."""

    def __init__(self, rows: KeptRows, file: DurableFile, same_tokens: bool) -> None:
        """`same_tokens`: whether they were tokenised as rows are now."""
        self._rows, self._file, self._same_tokens = rows, file, same_tokens

    def note(self, digests: bytes, rows: int) -> None:
        """Note so many rows; without digests nobody knows where they stood. Raises StorageError."""
        notes = np.zeros(rows, _NOTE)
        notes["row"] = found = self._rows.find(digests) if digests else np.full(rows, -1, np.int64)
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
    kept: Path, marker: KeptMarker, tokenizer: str, folder: Path, ops: FileOps
) -> Iterator[EarlierRows]:
    """Open the rows of a kept index; `folder` is that of the index that is made now, and `tokenizer` the digest of its
    tokenizer. Raises ValueError for a damaged one, OSError, StorageError."""
    with ExitStack() as stack:
        files = [stack.enter_context(opened(kept, one)) for one in marker.stretches]
        sources = tuple(map(_source, files))
        rows, file = KeptRows(KeptSource(sources, marker.attempts)), DurableFile(folder / _NAME, ops)
        stack.callback(file.close)
        yield EarlierRows(rows, file, marker.tokenizer == tokenizer)


def earlier_places(folder: Path) -> tuple[Numbers, list[bytes | None]]:
    """Return what was noted of the rows of an index, as far as they are read: the number that each had, -1 for none,
    and the key. Raises StorageError."""
    for path in (folder / _NAME, folder / (_NAME + TEMPORARY)):  # the second one while rows are read
        if path.is_file():
            with storage(path, "read"):
                data = path.read_bytes()
            notes = np.frombuffer(data[: len(data) // _NOTE.itemsize * _NOTE.itemsize], _NOTE)
            return np.ascontiguousarray(notes["row"]), [
                key if any(key) else None for key in notes["key"].tolist()
            ]
    return np.zeros(0, np.int64), []


def _source(files: Mapping[str, int]) -> StretchSource:
    """Return the rows of a stretch, of which each may be found: whether its answer is stored does not matter."""
    rows, words, order, params, ids, ends = (files[name] for name in OF_ROWS)
    return StretchSource(rows, words, order, params, ids, ends, None)
