"""Reuses files of the job's last published result in the next one.

    .batchinfer-res/result_files.json    the folder of the result; the fingerprint, size, sha256 and number of rows of
                                         each file; the segments of the kept index with these rows

A file with a known fingerprint is copied: its rows are neither joined nor written as Parquet again. Users may have
changed or removed the file, so its sha256 is checked while it is copied. If the copy fails, the file is written from
its rows. Files are not hard-linked: editing a result in place must not change another result, and a million rows with
short answers take only 8 MB.

The note is never wrong, at most useless: fingerprints and digests are compared with the actual files.
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
from batchinfer.filesystem.json_files import read_json
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.results.manifest import read_manifest
from batchinfer.store.results.result_files import StagedFile, staged_name
from batchinfer.store.results.reuse.fingerprints import NO_FINGERPRINTS, Fingerprints

FORMAT = 2
_READ_BYTES = 1 << 20


class EarlierFiles:
    """The files of a job's last published result, which the next result reuses if their rows are unchanged.

    A file is found by its fingerprint: a digest of everything that determines its bytes.
    """

    def __init__(self, state: StateFolder) -> None:
        self._ops = state.ops
        results, self._known, self.fingerprints = _read(state)
        self._published: dict[str, Path] = {}
        with suppress(DamagedResult, OutputConflict, StorageError):  # then no file is reused
            manifest = None if results is None else read_manifest(Location.at(results))
            if results is not None and manifest is not None:
                self._published = {file.sha256: results / file.name for file in manifest.files}

    def copy(self, number: int, fingerprint: str, rows: int, stage: Path) -> StagedFile | None:
        """Copy a file of the last result to the staging folder of the new result.

        Args:
            number: The number of the file in the new result.
            fingerprint: The fingerprint of the file.
            rows: The number of rows that the file must have.
            stage: The staging folder.

        Returns:
            The copy, or None if no unchanged file has this fingerprint.

        Raises:
            StorageError: The copy cannot be written.
        """
        known = self._known.get(fingerprint)
        source = None if known is None else self._published.get(known[1])
        if known is None or source is None or known[2] != rows:
            return None
        copy = _copy(source, stage / staged_name(number), Digest(*known[:2]), self._ops)
        size, sha256, rows, errors, retryable = known
        return StagedFile(number, rows, size, sha256, errors, retryable) if copy else None


Known = tuple[int, str, int, int, int]  # bytes, sha256, rows, errors, retryable errors


def remember_files(state: StateFolder, prints: Fingerprints, files: Sequence[StagedFile]) -> None:
    """Record a result as the job's last one, with the fingerprints of its files. Raises StorageError.

    Args:
        state: The state folder of the result.
        prints: The fingerprints of the files, in order.
        files: The files, in order.
    """
    listed = [[one, *astuple(file)[1:]] for one, file in zip(prints.files, files, strict=True)]
    results = os.path.relpath(state.results, state.job.parent)
    value = {"format": FORMAT, "results": results, "files": listed}
    value |= {"maker": prints.maker, "stretches": [*prints.segments]}
    with state.lock_shared():  # runs for other dates use the same temporary file
        write_json(state.result_files, value, state.ops)


def _read(state: StateFolder) -> tuple[Path | None, dict[str, Known], Fingerprints]:
    # Returns the folder of the last result, its files by fingerprint, and their fingerprints in order
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
    """Raised if the bytes that were copied differ from the published ones."""


def _copy(source: Path, target: Path, expected: Digest, ops: FileOps) -> bool:
    # Returns False, without a copy, if the digest differs or the file cannot be read
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
    # Other files than regular ones are not opened
    try:
        found = source.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == expected.bytes


def _pieces(source: Path, size: int) -> Iterator[bytes]:
    # Yields at most one byte more than `size`, since another process may append to the file
    with source.open("rb") as file:
        left = size + 1
        while left > 0 and (piece := file.read(min(left, _READ_BYTES))):
            yield piece
            left -= len(piece)
