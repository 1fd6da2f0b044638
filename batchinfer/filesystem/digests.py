"""The sha256 of files that rarely change, computed once for each state of a file: of results and of stored answers.

    ${XDG_CACHE_HOME:-~/.cache}/batchinfer/digests/<sha256 of the folder's path>.json

A remembered digest counts only while device, inode, size, mtime and ctime of the file are those that it had when it was
read. No program can set ctime, so whoever changes a file's bytes is noticed, also if the old mtime is put back. File
systems keep times in ticks, and a file that was written a moment ago may be written again within the same tick: its
digest is not remembered yet.

Only ever a shortcut: without the memory every file is read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.filesystem.durable import storage
from batchinfer.filesystem.remembered import read_json
from batchinfer.machine.folders import make_folder

SETTLED_S = 2.0  # the longest tick: FAT keeps times to two seconds
KEEP_MEMORY_S = 90 * 86400.0  # of a folder that nobody has read since
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """The properties of a file that change whenever its bytes do."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a change from now on would show."""
        return time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9 >= SETTLED_S


class FileDigests:
    """The digests of the files of one folder; `fresh` ones are computed whatever is remembered, and remembered then."""

    def __init__(self, known: Mapping[str, tuple[FileState, str]], *, fresh: bool = False) -> None:
        self.known = dict(known)
        self.changed = False
        self._fresh = fresh

    def of(self, path: Path) -> str:
        """The sha256 (hex) of a file's bytes. Raises StorageError."""
        with storage(path, "read"), path.open("rb") as file:
            before = FileState.of(os.fstat(file.fileno()))
            state, digest = self.known.get(path.name, (None, ""))
            if state == before and not self._fresh:
                return digest
            settled = before.settled
            digest = _sha256(file)
            after = FileState.of(os.fstat(file.fileno()))
        self._learn(path.name, before if settled and before == after else None, digest)
        return digest

    def _learn(self, name: str, state: FileState | None, digest: str) -> None:
        """A file without a state that can be told from a later one is not remembered."""
        before = self.known.pop(name, None)
        if state is not None:
            self.known[name] = (state, digest)
        self.changed = self.changed or self.known.get(name) != before


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def file_digests(folder: Path, *, fresh: bool = False) -> Iterator[FileDigests]:
    """The digests of a folder's files; those that the block computes are remembered when it ends, however it does."""
    memory = _memory_of(folder)
    digests = FileDigests({} if memory is None else _read(memory), fresh=fresh)
    try:
        yield digests
    finally:
        if memory is not None and digests.changed:
            _remember(memory, folder, digests.known)


def _memory_of(folder: Path) -> Path | None:
    """None where this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()
    return Path(base, "batchinfer", "digests", f"{name}.json") if os.path.isabs(base) else None


def _read(memory: Path) -> dict[str, tuple[FileState, str]]:
    raw = read_json(memory)
    found = {}
    for name, entry in raw.items() if isinstance(raw, dict) else ():
        match entry:
            case [int(), int(), int(), int(), int(), str()]:
                found[name] = (FileState(*entry[:5]), entry[5])
    return found


def _remember(memory: Path, folder: Path, known: Mapping[str, tuple[FileState, str]]) -> None:
    """Files that are gone are forgotten. A memory that cannot be written costs time only."""
    kept = {
        name: [*state, digest] for name, (state, digest) in known.items() if os.path.lexists(folder / name)
    }
    temporary = memory.with_name(f"{uuid.uuid4().hex}.tmp")  # several readers may end at once
    try:
        make_folder(memory.parent, 0o700)
        if not memory.exists():
            _forget_old(memory.parent)
        temporary.write_text(json.dumps(kept, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(memory)
    except OSError as error:
        _log.info("%s cannot be written (%s): %s is read in full again the next time", memory, error, folder)


def _forget_old(memories: Path) -> None:
    for path in memories.iterdir():
        if path.stat().st_mtime < time.time() - KEEP_MEMORY_S:
            path.unlink(missing_ok=True)
