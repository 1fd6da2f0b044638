"""Finished segments: segments of the kept index whose rows have been published, so they can be reused whole.

    .batchinfer-res/kept/whole.json               the marker, written last
    .batchinfer-res/kept/<segment>/index-*        the parts of the index with exactly these rows
    .batchinfer-res/kept/<segment>/carried-*      the passthrough parts with exactly these rows
    .batchinfer-res/kept/<segment>/places.bin     the position of each row's answer in the store
    .batchinfer-res/kept/<segment>/failed.bin     the rows whose answer is an error, with their keys

The results of a row depend on the rows before it, so a segment is only valid after the same segments. It is valid as
long as the store has all parts with its answers: the name of a part is never used again, and a part never changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import Digest, DurableFile, FileOps, sha256_of, storage, write_json
from batchinfer.store.kept.files import FINISHED, lock_marker, read_marker

FORMAT = 1
POSITIONS, FAILED = "places.bin", "failed.bin"
POSITION_TYPE = np.dtype("<i8")
FAILED_TYPE = np.dtype([("row", "<i8"), ("key", "V32")])
_COPIED = 1 << 20  # bytes per read or write


@dataclass(frozen=True, slots=True)
class FinishedSegment:
    """The record of a segment of the kept index whose rows were all published.

    Its index rows and the positions of its answers were saved, so that a run can reuse all of them at once.

    Attributes:
        folder: The name of the segment's folder in the kept index.
        before: The folder of the segment before it, "" for the first segment.
        rows: Number of rows.
        distinct: Number of different work keys among all rows up to the last row of the segment.
        errors: Number of error rows that never became requests, and how many of them are retryable.
        failed: Number of rows whose answer is an error, and how many of them are retryable.
        store: The names of the parts of the store with its answers. The file of positions refers to a part by
            its number in this list.
        files: The sizes and digests of the files in its folder by name, in row order.
    """

    folder: str
    before: str
    rows: int
    distinct: int
    errors: tuple[int, int]
    failed: tuple[int, int]
    store: tuple[str, ...]
    files: Mapping[str, Digest]

    def to_json(self) -> dict[str, Any]:
        """Return the record of the segment as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FinishedSegment:
        """Return the record of a finished segment from a JSON object of `to_json`.

        Raises KeyError, TypeError or ValueError if the object is damaged.
        """
        errors, retryable = value["errors"]
        failed, again = value["failed"]
        counts = {"errors": (int(errors), int(retryable)), "failed": (int(failed), int(again))}
        files = {str(name): Digest(**one) for name, one in value["files"].items()}
        return cls(**{**value, **counts, "store": tuple(value["store"]), "files": files})

    def parts(self, kind: str) -> list[str]:
        """Return the names of the segment's Parquet files for the index or for passthrough columns, in row order.

        Args:
            kind: INDEX for parts of the index, CARRIED for passthrough parts.
        """
        return sorted(name for name in self.files if name.startswith(f"{kind}-"))


@dataclass(frozen=True, slots=True)
class FinishedMarker:
    """The content of whole.json: the records of all finished segments of a job's kept index.

    Attributes:
        identity: A hash of everything, except the input, that determines the rows.
        segments: The finished segments, in row order.
        seen: The names of all parts of the store when the file was written.
    """

    identity: str
    segments: tuple[FinishedSegment, ...]
    seen: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of whole.json as a JSON object that includes its own digest."""
        segments = [one.to_json() for one in self.segments]
        value = {"format": FORMAT, "identity": self.identity, "stretches": segments, "seen": self.seen}
        return value | {"sha256": _digest(value)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FinishedMarker:
        """Return the content of whole.json from a JSON object of `to_json`.

        Raises KeyError, TypeError or ValueError if the object is damaged.
        """
        if value.pop("sha256") != _digest(value):
            raise ValueError("it has changed since it was written")
        segments = tuple(FinishedSegment.from_json(one) for one in value["stretches"])
        return cls(value["identity"], segments, tuple(value["seen"]))

    def leading(self, folders: Sequence[str]) -> list[FinishedSegment]:
        """Return the records of the segments before the first unfinished segment, in row order.

        Args:
            folders: The folders of the segments of the kept index, in row order.
        """
        known, found, before = {one.folder: one for one in self.segments}, list[FinishedSegment](), ""
        for folder in folders:
            one = known.get(folder)
            if one is None or one.before != before:
                break
            found.append(one)
            before = folder
        return found


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_finished(kept: Path) -> FinishedMarker | None:
    """Return the content of whole.json. None: there is none, or another version of batchinfer wrote it.

    Args:
        kept: The folder of the kept index.

    Raises:
        ValueError: The file is damaged.
        OSError: It cannot be read.
    """
    try:
        value = json.loads((kept / FINISHED).read_bytes())
        return FinishedMarker.from_json(value) if value["format"] == FORMAT else None
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has changed since it was written ({error!r})") from error


def is_still_valid(segment: FinishedSegment, seen: Collection[str], parts: Collection[str]) -> bool:
    """Return True if the store still has the same answers for a finished segment.

    All parts with its answers must still exist. Parts that were added since must follow these parts in name
    order, since answers of earlier parts take precedence.

    Args:
        segment: The finished segment.
        seen: The names of the parts of the store when the segment was recorded.
        parts: The names of the parts now.
    """
    there, last = set(parts), max(segment.store, default="")
    return there.issuperset(segment.store) and all(name > last for name in there.difference(seen))


def write_finished(kept: Path, marker: FinishedMarker, ops: FileOps) -> bool:
    """Write whole.json, unless another run has replaced the kept index. Return True if it was written.

    Args:
        kept: The folder of the kept index.
        marker: The new content of whole.json.
        ops: File operations.

    Raises:
        StorageError: The file cannot be written.
    """
    with lock_marker(kept):
        try:
            there = read_marker(kept)
        except (ValueError, OSError):
            there = None
        folders = tuple(one.folder for one in marker.segments)
        if there is None or there.folders[: len(folders)] != folders:
            return False
        write_json(kept / FINISHED, marker.to_json(), ops)
        return True


def reuse_file(kept: Path, segment: FinishedSegment, name: str, target: Path, ops: FileOps) -> None:
    """Create a hard link, or else a copy, of a segment's file at `target`, and check its digest.

    The target stays valid if another run removes the segment.

    Args:
        kept: The folder of the kept index.
        segment: The segment.
        name: The name of the file in the segment's folder.
        target: The new path.
        ops: File operations.

    Raises:
        StorageError: The file is damaged or missing.
    """
    source = kept / segment.folder / name
    with storage(source, "take over"):
        try:
            ops.link(source, target)
        except OSError:
            copy_file(source, target, ops)
    if sha256_of(target) != segment.files[name].sha256:
        raise StorageError(f"{source}: its sha256 differs from the recorded one")


def link_file(source: Path, target: Path, ops: FileOps) -> Digest:
    """Create a hard link, or else a durable copy, of an immutable file, and return its size and digest.

    The link is durable once the folder of `target` is synced. Raises StorageError.
    """
    with storage(source, "keep"):
        try:
            ops.link(source, target)
        except OSError:
            return copy_file(source, target, ops)
        size = target.stat().st_size
    return Digest(size, sha256_of(target))


def copy_file(source: Path, target: Path, ops: FileOps) -> Digest:
    """Copy a file, sync the copy to disk, and return its size and digest.

    Raises StorageError, or OSError if the source cannot be read.
    """
    file = DurableFile(target, ops)
    try:
        with source.open("rb") as data:
            while piece := data.read(_COPIED):
                file.write(piece)
        return file.commit()
    finally:
        file.close()


def write_numbers(path: Path, numbers: NDArray[Any], ops: FileOps) -> Digest:
    """Write the bytes of a NumPy array to a file, sync it to disk, and return its size and digest.

    Raises StorageError.
    """
    file = DurableFile(path, ops)
    try:
        data = memoryview(np.ascontiguousarray(numbers).tobytes())
        for start in range(0, len(data), _COPIED):
            file.write(data[start : start + _COPIED])
        return file.commit()
    finally:
        file.close()


def read_numbers(path: Path, kind: Any) -> NDArray[Any]:
    """Return the NumPy array of type `kind` from a file written by `write_numbers`. Raises StorageError."""
    with storage(path, "read"):
        return np.fromfile(path, kind)
