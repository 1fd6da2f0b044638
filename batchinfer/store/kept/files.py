"""The folder of a kept index, with the files of its segments and a marker with their digests.

    .batchinfer-res/kept/kept.json       the marker, written last
    .batchinfer-res/kept/<random>/       the files of a segment: see chunks.py and facts.py
    .batchinfer-res/kept/whole.json      the segments that can be reused whole: see finished.py

Each job has one kept index, written by its last run. A reader opens all files first, since another run of the job may
replace them at any time. A segment has the rows of consecutive input files. Its files never change, so the next kept
index can contain the same segment. The files of finished.py are added later.
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
    """An input file whose prepared rows are in the kept index, because a run read it to its end.

    Attributes:
        file: Path, size and time of the file when it was read.
        sha256: The digest of its content.
        first_chunk: The number of its first chunk within the segment, from 0.
        chunks: How many chunks it has.
    """

    file: InputFile
    sha256: str
    first_chunk: int
    chunks: int


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """A segment of the kept index: the prepared rows of consecutive input files.

    Attributes:
        folder: The name of the folder with the segment's own files.
        digests: The sizes and digests of the segment's own files, by name.
        files: The input files.
    """

    folder: str
    digests: Mapping[str, Digest]
    files: tuple[KeptFile, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the segment of the kept index as a JSON object."""
        files = [asdict(one) | {"file": one.file.to_json()} for one in self.files]
        digests = {name: asdict(digest) for name, digest in self.digests.items()}
        return {"folder": self.folder, "digests": digests, "files": files}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeptSegment:
        """Return the segment in a JSON object of `to_json`.

        Raises KeyError, TypeError or AttributeError if the object is damaged.
        """
        files = tuple(KeptFile(**one | {"file": InputFile(**one["file"])}) for one in value["files"])
        digests = {name: Digest(**one) for name, one in value["digests"].items()}
        return cls(str(value["folder"]), digests, files)


@dataclass(frozen=True, slots=True)
class KeptMarker:
    """The content of kept.json, which lists the valid segments of a job's kept index.

    Attributes:
        identity: A hash of everything, except the input, that determines the prepared rows.
        segments: The segments in row order.
    """

    identity: str
    segments: tuple[KeptSegment, ...]

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the names of the segments' folders in the kept index, in row order."""
        return tuple(one.folder for one in self.segments)

    def to_json(self) -> dict[str, Any]:
        """Return the content of kept.json as a JSON object."""
        return {
            "format": KEPT_FORMAT,
            "identity": self.identity,
            "stretches": [one.to_json() for one in self.segments],
        }


def read_marker(kept: Path) -> KeptMarker | None:
    """Return the content of kept.json. None: there is none, or another version of batchinfer wrote it.

    Args:
        kept: The folder of the kept index.

    Raises:
        ValueError: The file is damaged.
        OSError: It cannot be read.
    """
    try:
        value = json.loads((kept / MARKER).read_bytes())
        if value["format"] != KEPT_FORMAT:
            return None
        segments = tuple(KeptSegment.from_json(one) for one in value["stretches"])
        return KeptMarker(str(value["identity"]), segments)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has changed since it was written ({error!r})") from error


@contextmanager
def open_segment(kept: Path, segment: KeptSegment, *, fresh: bool = False) -> Iterator[dict[str, int]]:
    """Open the files of a segment of the kept index, check their digests, and yield file descriptors by name.

    The descriptors stay valid if another run replaces the kept index. They are closed when the block ends.

    Args:
        kept: The folder of the kept index.
        segment: The segment.
        fresh: Read all files to compute the digests, instead of using cached ones.

    Raises:
        ValueError: A file is damaged or was replaced.
        OSError: A file cannot be opened.
        StorageError: A digest cannot be computed.
    """
    folder, held = kept / segment.folder, dict[str, int]()
    try:
        for name in NAMES:
            held[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        with file_digests(folder, fresh=fresh) as found:
            for name in NAMES:
                if found.of(folder / name) != segment.digests[name].sha256:
                    raise ValueError(f"{folder / name}: its sha256 differs from the recorded one")
                if not os.path.samestat(os.fstat(held[name]), os.stat(folder / name)):
                    raise ValueError(f"{folder / name}: it was replaced while it was opened")
        yield held
    finally:
        for file in held.values():
            os.close(file)


def read_open_file(file: int) -> bytes:
    """Return the bytes of the open file with this file descriptor."""
    return os.pread(file, os.fstat(file).st_size, 0)


def new_folder(kept: Path, ops: FileOps) -> Path:
    """Create a folder for a new segment in the folder of the kept index. Raises StorageError."""
    folder = kept / uuid.uuid4().hex
    with storage(folder, "create"):
        ops.mkdir(kept, 0o700)
        ops.mkdir(folder, 0o700)
    return folder


def replace_marker(kept: Path, marker: KeptMarker, ops: FileOps) -> None:
    """Replace the kept index of a job by the segments of `marker`, and remove unused segments.

    If another run has removed a segment of `marker`, the kept index stays as it is. The new segments of this
    run are then removed.

    Args:
        kept: The folder of the kept index.
        marker: The new content of kept.json.
        ops: File operations.

    Raises:
        StorageError: A file cannot be written or removed.
    """
    with storage(kept, "create"):
        ops.mkdir(kept, 0o700)  # an input without rows has no segment
    with lock_marker(kept):
        try:
            before = read_marker(kept)
        except (ValueError, OSError):  # damaged; remove_strays removes its files later
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
    """Hold the lock for kept.json and whole.json in the folder of the kept index while the block runs."""
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
    """Remove files that killed runs left in the folder of the kept index. Raises StorageError.

    No other process may be writing to the folder.
    """
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
    """Return the Unix time at which the kept index was last written, or None if there is no kept index.

    Raises StorageError if that cannot be determined.
    """
    try:
        return (kept / MARKER).stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{kept / MARKER}: cannot be read: {error}") from error
