"""The folder of a kept index: its files, which are written durably, and the marker that names them with their digests.

    .batchinfer-res/kept/kept.json       the marker, written last
    .batchinfer-res/kept/<random>/       the files of a segment of the rows: see chunks.py and facts.py
    .batchinfer-res/kept/whole.json      what of these is taken over whole: see whole.py

There is one for each job, that of its last run. Whoever reads it has opened all its files before: another run of the
job may put its own in place meanwhile. A segment is the rows of some input files, one after the other. Its files never
change, so that the next kept index may have it, too; those of whole.py are added to them later.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.digests import file_digests
from batchinfer.filesystem.durable import Digest, FileOps, storage, write_json
from batchinfer.input.input_file import InputFile

KEPT_FORMAT = 6
MARKER, FINISHED = "kept.json", "whole.json"
NAMES = REPLIES, CHUNKS, FACTS = "replies.bin", "chunks.jsonl", "facts.json"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """An input file as it was read, all of it: its content, and which of the segment's chunks are its."""

    file: InputFile
    sha256: str
    first_chunk: int
    chunks: int


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """A segment of the rows: where its files are, their digests, and which input files its rows are of."""

    folder: str
    digests: Mapping[str, Digest]
    files: tuple[KeptFile, ...]

    def to_json(self) -> dict[str, Any]:
        files = [asdict(one) | {"file": one.file.to_json()} for one in self.files]
        digests = {name: asdict(digest) for name, digest in self.digests.items()}
        return {"folder": self.folder, "digests": digests, "files": files}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeptSegment:
        """Raises KeyError, TypeError, AttributeError for what is no segment."""
        files = tuple(KeptFile(**one | {"file": InputFile(**one["file"])}) for one in value["files"])
        digests = {name: Digest(**one) for name, one in value["digests"].items()}
        return cls(str(value["folder"]), digests, files)


@dataclass(frozen=True, slots=True)
class KeptMarker:
    """The contents of the marker. `identity` says of which settings the rows are. The rows of the segments follow one
    another."""

    identity: str
    segments: tuple[KeptSegment, ...]

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the names of the segments' folders."""
        return tuple(one.folder for one in self.segments)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": KEPT_FORMAT,
            "identity": self.identity,
            "stretches": [one.to_json() for one in self.segments],
        }


def read_marker(kept: Path) -> KeptMarker | None:
    """Return the marker; None: nothing is kept, or by another version. Raises ValueError for a damaged marker,
    OSError."""
    try:
        value = json.loads((kept / MARKER).read_bytes())
        if value["format"] != KEPT_FORMAT:
            return None
        segments = tuple(KeptSegment.from_json(one) for one in value["stretches"])
        return KeptMarker(str(value["identity"]), segments)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not as it was written ({error!r})") from error


@contextmanager
def open_segment(kept: Path, segment: KeptSegment, *, fresh: bool = False) -> Iterator[dict[str, int]]:
    """Open the files of a segment, and check that each is as it was written; within the block they can be read, by
    name. Raises ValueError for one that is not, OSError, StorageError. `fresh`: no digest that was computed before
    counts."""
    folder, held = kept / segment.folder, dict[str, int]()
    try:
        for name in NAMES:
            held[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        with file_digests(folder, fresh=fresh) as found:
            for name in NAMES:
                if found.of(folder / name) != segment.digests[name].sha256:
                    raise ValueError(f"{folder / name}: its sha256 is not the recorded one")
                if not os.path.samestat(os.fstat(held[name]), os.stat(folder / name)):
                    raise ValueError(f"{folder / name}: it was replaced at this moment")
        yield held
    finally:
        for file in held.values():
            os.close(file)


def read_open_file(file: int) -> bytes:
    """Return the bytes of an open file."""
    return os.pread(file, os.fstat(file).st_size, 0)


def new_folder(kept: Path, ops: FileOps) -> Path:
    """Make a folder for the files of a new segment. Raises StorageError."""
    folder = kept / uuid.uuid4().hex
    with storage(folder, "create"):
        ops.mkdir(kept, 0o700)
        ops.mkdir(folder, 0o700)
    return folder


def replace_marker(kept: Path, marker: KeptMarker, ops: FileOps) -> None:
    """Make these segments the job's kept index, and remove those of the one before that are not among them. Runs of
    the job that end at the same time do so one after another: where another one has removed a segment, its index
    stays. Raises StorageError."""
    with storage(kept, "create"):
        ops.mkdir(kept, 0o700)  # an input without rows has no segment
    with lock_marker(kept):
        try:
            before = read_marker(kept)
        except (ValueError, OSError):  # damaged: its files are found as those of killed runs are
            before = None
        there = set() if before is None else {*before.folders}
        if all((kept / folder).is_dir() for folder in marker.folders):
            write_json(kept / MARKER, marker.to_json(), ops)
            unused = there - {*marker.folders}
        else:
            unused = {*marker.folders} - there
        for folder in sorted(unused):
            if (kept / folder).is_dir():
                _remove(kept / folder, ops)


@contextmanager
def lock_marker(kept: Path) -> Iterator[None]:
    """Hold back others that replace the marker: each reads the one before, and all write it by one temporary name."""
    with storage(kept, "lock"):
        fd = os.open(kept, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
    try:
        yield
    finally:
        os.close(fd)


def remove_strays(kept: Path, ops: FileOps) -> None:
    """Remove the files of killed runs. Nobody else may be writing such files now. Raises StorageError."""
    if not kept.is_dir():
        return
    try:
        marker = read_marker(kept)
    except (ValueError, OSError):
        marker = None
    named = (MARKER, FINISHED, *marker.folders) if marker is not None else (MARKER,)
    for entry in sorted(kept.iterdir()):
        if entry.name not in named:
            _remove(entry, ops)


def _remove(entry: Path, ops: FileOps) -> None:
    with storage(entry, "remove"):
        if entry.is_dir():
            ops.remove_tree(entry)
        else:
            ops.unlink(entry)


def last_kept(kept: Path) -> float | None:
    """Return when something was last kept, in Unix time; None: never."""
    try:
        return (kept / MARKER).stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{kept / MARKER}: cannot be looked at: {error}") from error
