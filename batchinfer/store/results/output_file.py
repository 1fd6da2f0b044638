"""A single file that the command line names for writing, held to the rules of `output.path`.

Refused before anything runs: a file that the job reads or lives in, a file that this job did not write, a place
where nothing can be written. What the job has written is remembered by digest in its state, so that a file that
somebody edited since counts as somebody else's.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.core.errors import OutputConflict, StorageError
from batchinfer.filesystem.durable import (
    TEMPORARY,
    Digest,
    DurableFile,
    check_free_space,
    sha256_of,
    storage,
    write_json,
)
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.remembered import read_json
from batchinfer.filesystem.state import STATE_PREFIX, StateFolder
from batchinfer.input.files import list_inputs, would_read
from batchinfer.store.results.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from batchinfer.job import Job
from batchinfer.job.file import not_utf8

_PROBE_BYTES = 4096  # one block: a full disk refuses it
_LOOKS = 3  # at a file that another run of the job replaces meanwhile


@dataclass(frozen=True, slots=True)
class Protected:
    """The files that a job needs, which no output file may replace. `inputs` are its paths and patterns."""

    files: tuple[tuple[str, Path], ...]  # (what it is, where)
    folders: tuple[tuple[str, Path], ...]
    inputs: tuple[str, ...]
    input_files: tuple[Path, ...]

    @classmethod
    def by(cls, job: Job, *states: StateFolder) -> Protected:
        """Collect the files that this job needs, with the result and state folders of `states`. Raises what listing the
        input raises."""
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
        if parent.name.startswith(STATE_PREFIX):
            return f"lies in a state folder of batchinfer ({parent})"
        if (parent / MANIFEST_NAME).exists():
            return f"lies in a result folder ({parent})"
    return None


@dataclass(frozen=True, slots=True)
class _Look:
    """Equal for a file that nobody has touched."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int


class OutputFile:
    """One file for one result of a job. `check` changes nothing; `probe` and `writing` need the result's lock.

    `option` is what the user typed before the path. Runs for other results of the job (other dates, trials) may write
    at the same time, also to the same path: each has a temporary file of its own, and they take turns to put a
    complete one in place and to note that in the ledger, which they share.
    """

    def __init__(
        self,
        location: Location,
        option: str,
        protected: Protected,
        state: StateFolder,
        *,
        replace: bool = False,
    ) -> None:
        self.path = Path(os.path.realpath(location.local))
        self._option, self._protected, self._state, self._replace = option, protected, state, replace
        self._ops = state.ops
        self._temporary = self._temporary_of(state.path)
        self._digested: tuple[_Look, Digest] | None = None

    def _temporary_of(self, part: Path) -> Path:
        """Nobody else's name: the same after a kill, another one for every job and each of its results (its `part`)."""
        ours = _mark(self._state.job, self.path)
        return self.path.parent / f".batchinfer-{ours}-{_mark(part)}{TEMPORARY}"

    def check(self) -> None:
        """Raises OutputConflict for a file that must not be written or replaced, StorageError for one that
        cannot be looked at.
        """
        if (shown := not_utf8(self.path)) is not None:
            raise OutputConflict(
                f"{self._option} {shown}: the path holds bytes that are not UTF-8; choose another"
            )
        refusal = self._protected.refusal(self.path)
        if refusal is not None:
            raise self._conflict(f"{refusal}; choose another file")
        if not self.path.parent.is_dir():
            raise self._conflict(
                f"its folder {self.path.parent} is not there; make it, or choose another file"
            )
        self._ours()

    def probe(self) -> None:
        """Whether the folder takes a file now; what killed runs of the job left there is removed.

        Raises StorageError.
        """
        self._sweep()
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            file.write(bytes(_PROBE_BYTES))
            file.flush_to_disk()
        finally:
            file.abandon()

    def check_space(self, needed_bytes: int) -> None:
        """Raises StorageError when the disk has less than `needed_bytes` free."""
        needing = f"{self._option} {self.path}: the file needs at least"
        check_free_space(self.path.parent, needed_bytes, needing, "choose a file on another disk")

    def _sweep(self) -> None:
        """The next night's run has a temporary file with another name: without this, a killed one's stays for ever."""
        with self._state.exclusively():  # no run takes its lock meanwhile
            held = {self._temporary_of(part) for part in self._state.parts_in_use()}
            with storage(self.path.parent, "clear"):
                for left in self.path.parent.glob(
                    f".batchinfer-{_mark(self._state.job, self.path)}-*{TEMPORARY}"
                ):
                    if left not in held:
                        self._ops.unlink(left)

    @contextmanager
    def writing(self) -> Iterator[DurableFile]:
        """The file to write to: it takes its name when the block ends, and is given up by any exception.

        Raises OutputConflict when something was put there since `check`, StorageError.
        """
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            yield file
            file.flush_to_disk()  # what takes long is done before the job's other runs are held back
            self.check()
            with self._state.exclusively():
                self._write_entries([file.commit(self._remember)])
        finally:
            file.close()

    def _conflict(self, why: str) -> OutputConflict:
        return OutputConflict(f"{self._option} {self.path}: {why}")

    def _ours(self) -> Digest | None:
        """The digest of what is there, None where nothing is. Raises OutputConflict unless it may be replaced."""
        for _ in range(_LOOKS):
            there = self._look()
            if there is None:
                return None
            known = self._entries().get(str(self.path), [])
            sizes_match = there.bytes in {one.bytes for one in known}
            digest = self._digest(there) if self._replace or sizes_match else None
            if self._look() != there:
                continue  # another run of the job put its own there: the ledger that was read may not name it
            if digest is None or not (self._replace or digest in known):
                raise self._stranger()
            return digest
        raise self._stranger()

    def _look(self) -> _Look | None:
        """Return the properties that tell the present file from any other; None if there is none."""
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
        return _Look(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def _digest(self, there: _Look) -> Digest:
        """Read once: not again while the job's other runs wait, unless something else is there by then."""
        if self._digested is None or self._digested[0] != there:
            self._digested = (there, Digest(there.bytes, sha256_of(self.path)))
        return self._digested[1]

    def _stranger(self) -> OutputConflict:
        return self._conflict(
            "is there already, and this job did not write it, or it was changed since; "
            "move it away, choose another file, or replace it with --replace"
        )

    def _entries(self) -> dict[str, list[Digest]]:
        raw = read_json(self._state.written)
        if not isinstance(raw, dict):
            return {}
        return {
            path: [_digest(one) for one in found] for path, found in raw.items() if isinstance(found, list)
        }

    def _remember(self, written: Digest) -> None:
        """Record the digest before the rename, in addition to the old one: after a crash either file is known."""
        there = self._ours()
        self._write_entries([written] if there is None else [there, written])

    def _write_entries(self, ours: list[Digest]) -> None:
        """Needs `exclusively`: the entries of the job's other runs are read anew and kept."""
        kept = {path: found for path, found in self._entries().items() if os.path.exists(path)}
        kept[str(self.path)] = ours
        listed = {path: [asdict(one) for one in found] for path, found in kept.items()}
        write_json(self._state.written, listed, self._ops)


def _digest(raw: object) -> Digest:
    """Read a digest from JSON; one that cannot be read matches no file."""
    if isinstance(raw, dict) and isinstance(raw.get("bytes"), int):
        return Digest(raw["bytes"], str(raw.get("sha256")))
    return Digest(-1, "")


def _mark(*paths: Path) -> str:
    return hashlib.sha256("\0".join(os.path.realpath(path) for path in paths).encode()).hexdigest()[:16]
