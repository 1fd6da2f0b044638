"""PendingSegments of a kept index that are taken over whole: with them lies what became of their rows once published.

    .batchinfer-res/kept/whole.json               the marker, written last
    .batchinfer-res/kept/<segment>/index-*        the parts of the index that have its rows, and no others
    .batchinfer-res/kept/<segment>/carried-*      those with the columns that they carry
    .batchinfer-res/kept/<segment>/places.bin     where in the store each row's answer stands
    .batchinfer-res/kept/<segment>/failed.bin     the rows whose answer is an error, and their keys

What becomes of a row depends on the rows before it, so a segment counts behind the same segments only. It counts as
long as the store has all parts that its answers stand in: a part has its name once and for all, and never changes.
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
_COPIED = 1 << 20  # bytes at once


@dataclass(frozen=True, slots=True)
class FinishedSegment:
    """A segment is whole once it is known what became of its rows. `before`: the segment that they stand behind, ""
    for the first one.

    `files` are those of its folder, with their digests, in the order of the rows. The numbers of parts in its places
    are those of `store`, all of which it uses. `errors` are the rows that never became requests, `failed` those whose
    answer is an error, both with how many of them are retryable. `distinct`: keys of the job's rows up to its last one.
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
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FinishedSegment:
        """Raises KeyError, TypeError, ValueError for what is none."""
        errors, retryable = value["errors"]
        failed, again = value["failed"]
        counts = {"errors": (int(errors), int(retryable)), "failed": (int(failed), int(again))}
        files = {str(name): Digest(**one) for name, one in value["files"].items()}
        return cls(**{**value, **counts, "store": tuple(value["store"]), "files": files})

    def parts(self, kind: str) -> list[str]:
        """Return the names of its parts of the index, or of what is carried, in the order of the rows."""
        return sorted(name for name in self.files if name.startswith(f"{kind}-"))


@dataclass(frozen=True, slots=True)
class FinishedMarker:
    """The contents of the marker. `identity` says of which settings the rows are; `seen` are the parts that the store
    had."""

    identity: str
    segments: tuple[FinishedSegment, ...]
    seen: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        segments = [one.to_json() for one in self.segments]
        value = {"format": FORMAT, "identity": self.identity, "stretches": segments, "seen": self.seen}
        return value | {"sha256": _digest(value)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FinishedMarker:
        """Raises KeyError, TypeError, ValueError for what is none."""
        if value.pop("sha256") != _digest(value):
            raise ValueError("it is not as it was written")
        segments = tuple(FinishedSegment.from_json(one) for one in value["stretches"])
        return cls(value["identity"], segments, tuple(value["seen"]))

    def leading(self, folders: Sequence[str]) -> list[FinishedSegment]:
        """Return what is known of the first of these segments, up to one of which nothing is."""
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
    """Return the marker; None: there is none, or of another version. Raises ValueError for a damaged one, OSError."""
    try:
        value = json.loads((kept / FINISHED).read_bytes())
        return FinishedMarker.from_json(value) if value["format"] == FORMAT else None
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not as it was written ({error!r})") from error


def is_still_valid(segment: FinishedSegment, seen: Collection[str], parts: Collection[str]) -> bool:
    """Whether a store with these parts has all answers of a segment, and none came before them since the store had the
    parts that were `seen`. Parts are ordered by their names."""
    there, last = set(parts), max(segment.store, default="")
    return there.issuperset(segment.store) and all(name > last for name in there.difference(seen))


def write_finished(kept: Path, marker: FinishedMarker, ops: FileOps) -> bool:
    """Write the marker, where the kept index still begins with these segments: another run may have replaced it.
    Raises StorageError."""
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
    """Give a file of a segment a second name, where nobody removes it meanwhile; on file systems without such names,
    copy it. Raises StorageError where it is not as it was written, or gone."""
    source = kept / segment.folder / name
    with storage(source, "take over"):
        try:
            ops.link(source, target)
        except OSError:
            copy_file(source, target, ops)
    if sha256_of(target) != segment.files[name].sha256:
        raise StorageError(f"{source}: its sha256 is not the recorded one")


def link_file(source: Path, target: Path, ops: FileOps) -> Digest:
    """Give a file that never changes a second name; on file systems without such names, copy it durably. The name is
    durable once the folder's is that has it. Raises StorageError."""
    with storage(source, "keep"):
        try:
            ops.link(source, target)
        except OSError:
            return copy_file(source, target, ops)
        size = target.stat().st_size
    return Digest(size, sha256_of(target))


def copy_file(source: Path, target: Path, ops: FileOps) -> Digest:
    """Copy a file durably. Raises StorageError, OSError where it cannot be read."""
    file = DurableFile(target, ops)
    try:
        with source.open("rb") as data:
            while piece := data.read(_COPIED):
                file.write(piece)
        return file.commit()
    finally:
        file.close()


def write_numbers(path: Path, numbers: NDArray[Any], ops: FileOps) -> Digest:
    """Write an array of numbers durably. Raises StorageError."""
    file = DurableFile(path, ops)
    try:
        data = memoryview(np.ascontiguousarray(numbers).tobytes())
        for start in range(0, len(data), _COPIED):
            file.write(data[start : start + _COPIED])
        return file.commit()
    finally:
        file.close()


def read_numbers(path: Path, kind: Any) -> NDArray[Any]:
    """Return an array of numbers that was written so. Raises StorageError."""
    with storage(path, "read"):
        return np.fromfile(path, kind)
