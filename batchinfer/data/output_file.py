"""A single file that the command line names for writing, held to the rules of `output.path`.

Refused before anything runs: a file that the job reads or lives in, a file that this job did not write, a place
where nothing can be written. What the job has written is remembered by digest in its state, so that a file that
somebody edited since counts as somebody else's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.data.durable import Digest, DurableFile, FileOps, sha256_of, storage, write_json
from batchinfer.data.files import list_inputs, would_read
from batchinfer.data.manifest import MANIFEST_NAME
from batchinfer.data.remembered import read_json
from batchinfer.data.state import StateFolder
from batchinfer.errors import OutputConflict, StorageError

if TYPE_CHECKING:
    from batchinfer.job import Job

WRITTEN = "written.json"  # in the state folder: file → digests of what the job wrote there
_STATE_PREFIX = ".batchinfer-"
_PROBE_BYTES = 4096  # one block: a full disk refuses it


@dataclass(frozen=True, slots=True)
class Protected:
    """What a job needs and no output file may touch. `inputs` are its paths and patterns."""

    files: tuple[tuple[str, Path], ...]  # (what it is, where)
    folders: tuple[tuple[str, Path], ...]
    inputs: tuple[str, ...]
    input_files: tuple[Path, ...]

    @classmethod
    def by(cls, job: Job, *states: StateFolder) -> Protected:
        """What this job needs, with the result and state folders of `states`. Raises what listing the input raises."""
        value = job.input.path or ()
        patterns = (value,) if isinstance(value, str) else tuple(value)
        listed = list_inputs(patterns, job.source.parent, job.input.format)
        folders = [("the model's folder", job.model.path)]
        for state in states:
            folders += [
                ("the result folder", state.results),
                ("the state folder", state.job),
                ("the store of completions", state.completions),
            ]
        files = (("the job file", job.source),)
        return cls(files, tuple(folders), patterns, tuple(Path(file.path) for file in listed))

    def refusal(self, path: Path) -> str | None:
        """Why `path` (links resolved) cannot be written, as the end of a sentence; None where it can."""
        for what, file in (*self.files, *(("an input of the job", file) for file in self.input_files)):
            if _same(path, file):
                return f"is {what} ({file})"
        for what, folder in self.folders:
            real = Path(os.path.realpath(folder))
            if real.is_relative_to(path):
                return f"is the place of {what} ({folder})"
            if path.is_relative_to(real):
                return f"lies in {what} ({folder})"
        if would_read(self.inputs, path):
            return "is where the job looks for input: the next run would read it"
        return _others_folder(path)


def _same(path: Path, other: Path) -> bool:
    """By name, and by inode where both exist: hard links too."""
    if path == Path(os.path.realpath(other)):
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _others_folder(path: Path) -> str | None:
    for parent in path.parents:
        if parent.name.startswith(_STATE_PREFIX):
            return f"lies in a state folder of batchinfer ({parent})"
        if (parent / MANIFEST_NAME).exists():
            return f"lies in a result folder ({parent})"
    return None


class OutputFile:
    """One file for one job. `check` changes nothing; `probe` and `writing` need the job's lock.

    `option` is what the user typed before the path; `state` is the job's state folder.
    """

    def __init__(
        self,
        path: Path,
        option: str,
        protected: Protected,
        state: Path,
        *,
        replace: bool = False,
        ops: FileOps | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._option, self._protected, self._replace = option, protected, replace
        self._ledger = state / WRITTEN
        self._ops = ops or FileOps()
        # a name that is nobody's: the same after a kill, and another one for every job
        mark = hashlib.sha256(f"{os.path.realpath(state)}\0{self.path}".encode()).hexdigest()[:16]
        self._temporary = self.path.parent / f".batchinfer-{mark}.tmp"

    def check(self) -> None:
        """Raises OutputConflict for a file that must not be written or replaced, StorageError for one that
        cannot be looked at.
        """
        refusal = self._protected.refusal(self.path)
        if refusal is not None:
            raise self._conflict(f"{refusal}; choose another file")
        if not self.path.parent.is_dir():
            raise self._conflict(
                f"its folder {self.path.parent} is not there; make it, or choose another file"
            )
        self._ours()

    def probe(self) -> None:
        """Whether the folder takes a file now. Raises StorageError."""
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            file.write(bytes(_PROBE_BYTES))
            file.flush_to_disk()
        finally:
            file.abandon()

    def check_space(self, needed_bytes: int) -> None:
        """Raises StorageError when the disk has less than `needed_bytes` free."""
        with storage(self.path.parent, "ask for free space"):
            free = shutil.disk_usage(self.path.parent).free
        if free < needed_bytes:
            raise StorageError(
                f"{self._option} {self.path}: at least {needed_bytes:,} bytes will be written and {free:,} are "
                "free; make room, or choose a file on another disk"
            )

    @contextmanager
    def writing(self) -> Iterator[DurableFile]:
        """The file to write to: it takes its name when the block ends, and is given up by any exception.

        Raises OutputConflict when something was put there since `check`, StorageError.
        """
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            yield file
            self.check()
        except BaseException:
            file.abandon()
            raise
        self._write_entries([file.commit(self._remember)])

    def _conflict(self, why: str) -> OutputConflict:
        return OutputConflict(f"{self._option} {self.path}: {why}")

    def _ours(self) -> Digest | None:
        """The digest of what is there, None where nothing is. Raises OutputConflict unless it may be replaced."""
        try:
            with storage(self.path, "look at"):
                found = os.stat(self.path)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise self._conflict(f"is {kind}; choose a file")
        known = self._known()
        if not self._replace and found.st_size not in {one.bytes for one in known}:
            raise self._stranger()
        digest = Digest(found.st_size, sha256_of(self.path))
        if not self._replace and digest not in known:
            raise self._stranger()
        return digest

    def _stranger(self) -> OutputConflict:
        return self._conflict(
            "is there already, and this job did not write it, or it was changed since; "
            "move it away, choose another file, or replace it with --replace"
        )

    def _known(self) -> Sequence[Digest]:
        return self._entries().get(str(self.path), [])

    def _entries(self) -> dict[str, list[Digest]]:
        raw = read_json(self._ledger)
        if not isinstance(raw, dict):
            return {}
        return {
            path: [_digest(one) for one in found] for path, found in raw.items() if isinstance(found, list)
        }

    def _remember(self, written: Digest) -> None:
        """Before the rename, beside what is there now: a crash on either side of it finds its file known."""
        there = self._ours()
        self._write_entries([written] if there is None else [there, written])

    def _write_entries(self, ours: list[Digest]) -> None:
        kept = {path: found for path, found in self._entries().items() if os.path.exists(path)}
        kept[str(self.path)] = ours
        with storage(self._ledger.parent, "create"):
            self._ops.mkdir(self._ledger.parent, 0o700)
        listed = {path: [asdict(one) for one in found] for path, found in kept.items()}
        write_json(self._ledger, listed, self._ops)


def _digest(raw: object) -> Digest:
    """What cannot be read matches no file."""
    if isinstance(raw, dict) and isinstance(raw.get("bytes"), int):
        return Digest(raw["bytes"], str(raw.get("sha256")))
    return Digest(-1, "")
