"""The files of the result that the job published last, as far as they are files of the next one, too.

    .batchinfer-res/result_files.json    which result it was; of each of its files the fingerprint, size, sha256 and
                                         rows; and which segments of the kept index these rows are

A file whose fingerprint is known is copied instead of made: its rows are neither joined nor written as Parquet again.
Whoever looks at results may have changed or removed it, so what is copied counts by its bytes, whose sha256 is taken on
the way; where it is another one, or the file cannot be read, the file is made as if nothing were known. A copy and no
hard link: a result that somebody edits in place must not change the one before or after it, and a million rows of short
answers are 8 MB.

Only ever a shortcut: fingerprints and digests say all, so that a note of another result, or an older one, is not wrong.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from batchinfer.core.errors import DamagedResult, OutputConflict, StorageError
from batchinfer.filesystem.durable import Digest, DurableFile, FileOps, write_json
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.remembered import read_json
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.results.manifest import read_manifest
from batchinfer.store.results.result_files import StagedFile, staged_name
from batchinfer.store.results.reuse.fingerprints import NO_FINGERPRINTS, Fingerprints

FORMAT = 2
_READ_BYTES = 1 << 20


class EarlierFiles:
    """The files of the job's last result, whose fingerprints are known."""

    def __init__(self, state: StateFolder) -> None:
        self._ops = state.ops
        results, self._known, self.fingerprints = _read(state)
        self._published: dict[str, Path] = {}
        with suppress(DamagedResult, OutputConflict, StorageError):  # then all files are made
            manifest = None if results is None else read_manifest(Location.at(results))
            if results is not None and manifest is not None:
                self._published = {file.sha256: results / file.name for file in manifest.files}

    def copied(self, number: int, fingerprint: str, rows: int, stage: Path) -> StagedFile | None:
        """Copy the file with this fingerprint to the files that are staged, as the one with that number; None: there is
        none that is as it was published. Raises StorageError where the copy cannot be written."""
        known = self._known.get(fingerprint)
        source = None if known is None else self._published.get(known[1])
        if known is None or source is None or known[2] != rows:
            return None
        copy = _copy(source, stage / staged_name(number), Digest(*known[:2]), self._ops)
        size, sha256, rows, errors, retryable = known
        return StagedFile(number, rows, size, sha256, errors, retryable) if copy else None


Known = tuple[int, str, int, int, int]  # bytes, sha256, rows, errors, retryable ones


def remember_files(state: StateFolder, prints: Fingerprints, files: Sequence[StagedFile]) -> None:
    """Remember the files of this result by their fingerprints: it is the job's last one now. Raises StorageError."""
    listed = [[one, *astuple(file)[1:]] for one, file in zip(prints.files, files, strict=True)]
    results = os.path.relpath(state.results, state.job.parent)
    value = {"format": FORMAT, "results": results, "files": listed}
    value |= {"maker": prints.maker, "stretches": [*prints.segments]}
    with state.exclusively():  # runs for other dates use the same temporary name
        write_json(state.result_files, value, state.ops)


def _read(state: StateFolder) -> tuple[Path | None, dict[str, Known], Fingerprints]:
    """Return the folder of the last result, its files by fingerprint, and these."""
    found: dict[str, Known] = {}
    match read_json(state.result_files):
        case {
            "format": int(version),
            "results": str(results),
            "files": list(files),
            "maker": str(maker),
            "stretches": list(segments),
        } if version == FORMAT:
            for entry in files:
                match entry:
                    case [str(fingerprint), int(rows), int(size), str(sha256), int(errors), int(retryable)]:
                        found[fingerprint] = (size, sha256, rows, errors, retryable)
            prints = Fingerprints(tuple(found), maker, tuple(map(tuple, segments)))
            whole = len(found) == len(files)
            return state.job.parent / results, found, prints if whole else NO_FINGERPRINTS
    return None, found, NO_FINGERPRINTS


class _AnotherFile(Exception):
    """The bytes are not those that were published."""


def _copy(source: Path, target: Path, expected: Digest, ops: FileOps) -> bool:
    """Copy a file durably; False where it has not these bytes any more, or cannot be read: then there is no copy."""

    def check(found: Digest) -> None:
        if found != expected:
            raise _AnotherFile

    if not _may_be(source, expected):
        return False
    file = DurableFile(target, ops)
    try:
        for piece in _pieces(source, expected.bytes):
            file.write(piece)
        file.commit(check)
    except (_AnotherFile, OSError):  # writing raises StorageError
        return False
    finally:
        file.close()
    return True


def _may_be(source: Path, expected: Digest) -> bool:
    """Whether it is a file of that size: anything else is not opened."""
    try:
        found = source.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == expected.bytes


def _pieces(source: Path, size: int) -> Iterator[bytes]:
    """Yield a file's bytes, and no more than one over `size`: somebody may write to it meanwhile."""
    with source.open("rb") as file:
        left = size + 1
        while left > 0 and (piece := file.read(min(left, _READ_BYTES))):
            yield piece
            left -= len(piece)
