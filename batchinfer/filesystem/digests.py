"""Caches the sha256 of files that rarely change, such as results and stored answers.

    ${XDG_CACHE_HOME:-~/.cache}/batchinfer/digests/<sha256 of the folder's path>.json

A cached digest is valid while device, inode, size, mtime and ctime of the file are unchanged. Programs cannot set
ctime, so every change of a file's bytes is detected, even if its mtime is restored. Because file systems store times
with limited resolution, a recently written file may change again without a change of its times. Its digest is not
cached yet.

Without the cache, every file is read again.
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
from batchinfer.filesystem.json_files import read_json
from batchinfer.machine.folders import make_folder

SETTLED_S = 2.0  # coarsest resolution of file times: two seconds on FAT
KEEP_MEMORY_S = 90 * 86400.0  # caches of folders that were not read for this long are removed
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """Properties of a file. They cannot all stay the same if its bytes change.

    Times are Unix times in ns.
    """

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Return the properties of a file from its stat result."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Return True if the file's times are so old that any later change of the file must change them.

        File systems store times in steps of up to 2 seconds. Two changes within a step can have equal times.
        """
        return time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9 >= SETTLED_S


class FileDigests:
    """The sha256 of the files in a folder, cached between runs.

    Args:
        known: The cached digests: for each file name, the file's state when it was read, and its sha256.
        fresh: Compute all digests again, instead of using cached ones.
    """

    def __init__(self, known: Mapping[str, tuple[FileState, str]], *, fresh: bool = False) -> None:
        self.known = dict(known)
        self.changed = False
        self._fresh = fresh

    def of(self, path: Path) -> str:
        """Return the sha256 (hex) of a file in the folder, from the cache if the file is unchanged.

        Raises StorageError if the file cannot be read.
        """
        with storage(path, "read"), path.open("rb") as file:
            before = FileState.of(os.fstat(file.fileno()))
            state, digest = self.known.get(path.name, (None, ""))
            if state == before and not self._fresh:
                return digest
            is_settled = before.is_settled
            digest = _sha256(file)
            after = FileState.of(os.fstat(file.fileno()))
        self._learn(path.name, before if is_settled and before == after else None, digest)
        return digest

    def _learn(self, name: str, state: FileState | None, digest: str) -> None:
        # Without a state, the digest is forgotten: a later change of the file might not be detected
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
    """Yield the sha256 digests of a folder's files, which are read from and saved to a cache of this user.

    Digests that are computed in the block are saved when the block ends, even after an error.

    Args:
        folder: The folder.
        fresh: Compute all digests again, instead of using cached ones.
    """
    memory = _memory_of(folder)
    digests = FileDigests({} if memory is None else _read(memory), fresh=fresh)
    try:
        yield digests
    finally:
        if memory is not None and digests.changed:
            _remember(memory, folder, digests.known)


def _memory_of(folder: Path) -> Path | None:
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
    # An error is ignored: it only costs time
    kept = {
        name: [*state, digest] for name, (state, digest) in known.items() if os.path.lexists(folder / name)
    }
    temporary = memory.with_name(f"{uuid.uuid4().hex}.tmp")  # several processes may write at the same time
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
