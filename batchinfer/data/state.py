"""The state folder: what a job keeps between runs, in a hidden sibling of its results.

    /d/res                          the results
    /d/.batchinfer-res/             mode 0700, since it holds prompts
        state.json                  {"format": 1}
        lock                        flock target; holds the pid of the run that has it
        scratch/<index id>/         index, tokens, passthrough, plan: purged once the results are published
        completions/                finished work by key (or `cache.path`, shared between jobs)
        staging/next/               the results being written
        generations/<generation>/   the results that were replaced, kept for an hour
        fingerprints.json           sha256 of weight files

A sibling and not a child: DuckDB's `**` enters hidden folders.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.data.durable import FileOps, storage, write_json
from batchinfer.errors import Locked, StorageError
from batchinfer.sizes import sizes

STATE_FORMAT = 1
KEEP_GENERATIONS_S = 3600.0


class StateFolder:
    """The paths of one job's state, its lock, and what is swept from it."""

    def __init__(self, results: Path, *, cache: Path | None = None, ops: FileOps | None = None) -> None:
        self.results = results.absolute()
        self.path = self.results.parent / f".batchinfer-{self.results.name}"
        self.ops = ops or FileOps()
        self.completions = cache.absolute() if cache else self.path / "completions"
        self.lock_path = self.path / "lock"
        self.scratch = self.path / "scratch"
        self.staging = self.path / "staging"
        self.generations = self.path / "generations"
        self.fingerprints = self.path / "fingerprints.json"
        self._marker = self.path / "state.json"

    def scratch_for(self, index_id: str) -> Path:
        """Where the index of this identity lies."""
        return self.scratch / index_id

    @contextmanager
    def lock(self) -> Iterator[StateFolder]:
        """Create the folder if need be and hold its lock. Raises Locked, StorageError (74) for a newer
        format.

        The lock is the kernel's: it ends with the process, however that ends.
        """
        self._create()
        with storage(self.lock_path, "open"):
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(fd)
            self._check_format()
            yield self
        finally:
            os.close(fd)

    def purge_scratch(self, keep: str | None = None) -> None:
        """Remove prompts, tokens, index and plan, but for the index with the identity `keep`."""
        for folder in _entries(self.scratch):
            if folder.name != keep:
                self._remove(folder)

    def remove_old_generations(self, now: float | None = None, keep_s: float = KEEP_GENERATIONS_S) -> int:
        """Remove replaced results older than `keep_s` seconds; how many there were. `now` is Unix time."""
        limit = (time.time() if now is None else now) - keep_s
        old = [folder for folder in _entries(self.generations) if folder.stat().st_mtime < limit]
        for folder in old:
            self._remove(folder)
        return len(old)

    def check_writable(self) -> None:
        """Raises StorageError when the state or the store cannot be written where they are to be."""
        for folder in (self.path, self.completions):
            place = next(one for one in (folder, *folder.parents) if one.exists())
            if not place.is_dir():
                raise StorageError(f"{place}: is a file; {folder} is to be a folder there")
            if not os.access(place, os.W_OK | os.X_OK):
                raise StorageError(f"{place}: cannot be written by this user; {folder} is to lie there")

    def check_space(self, needed_bytes: int) -> None:
        """Raises StorageError when the disk of the state folder has less than `needed_bytes` free."""
        place = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        with storage(place, "ask for free space"):
            free = shutil.disk_usage(place).free
        if free < needed_bytes:
            needs, has = sizes(needed_bytes, free)
            raise StorageError(
                f"{self.path}: the job needs about {needs} of disk, {has} are free; "
                "make room or point output.path at another disk"
            )

    def _create(self) -> None:
        with storage(self.path, "create"):
            self.ops.mkdir(self.path.parent)
            self.ops.mkdir(self.path, 0o700)
            self.path.chmod(0o700)  # a folder that was there already, or a loose umask

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StorageError(f"{self.lock_path}: cannot lock: {error}") from error
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise Locked(f"{self.results}: {who} is running this job; try again when it is done") from error
        with storage(self.lock_path, "write"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _check_format(self) -> None:
        if not self._marker.exists():
            write_json(self._marker, {"format": STATE_FORMAT}, self.ops)
        self.refuse_newer()

    def refuse_newer(self) -> None:
        """Raises StorageError when a newer version of batchinfer wrote the folder; writes nothing."""
        if not self._marker.exists():
            return
        with storage(self._marker, "read"):
            found = _format_of(self._marker)
        if not isinstance(found, int) or found > STATE_FORMAT:
            raise StorageError(
                f"{self._marker}: state format {found!r}, this version knows up to {STATE_FORMAT}; "
                "use the batchinfer that wrote it, or remove the folder to start over"
            )

    def _remove(self, folder: Path) -> None:
        with storage(folder, "remove"):
            self.ops.remove_tree(folder)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _format_of(marker: Path) -> object:
    try:
        value = json.loads(marker.read_bytes())
    except ValueError:
        return "unreadable"
    return value.get("format", "missing") if isinstance(value, dict) else "missing"
