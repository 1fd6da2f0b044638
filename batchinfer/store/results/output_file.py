"""A file that the command line names for writing. The rules of `output.path` apply.

Before anything runs, it refuses files that the job reads, files in folders of the job, files that this job did not
write, and paths that cannot be written. The digests of written files are recorded in the state folder, so a file that
was edited since counts as written by someone else.
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
from batchinfer.filesystem.json_files import read_json
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import STATE_PREFIX, StateFolder
from batchinfer.input.files import list_inputs, would_read
from batchinfer.store.results.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from batchinfer.job import Job
from batchinfer.job.file import not_utf8

_PROBE_BYTES = 4096  # one block, so writing fails on a full disk
_MAX_CHECKS = 3  # attempts to check a file that other runs replace at the same time


@dataclass(frozen=True, slots=True)
class ProtectedFiles:
    """The files and folders of a job that must not be replaced by a file named on the command line.

    Attributes:
        files: Descriptions and paths of single files.
        folders: Descriptions and paths of folders.
        inputs: The input paths and patterns of the job.
        input_files: The input files that they match.
    """

    files: tuple[tuple[str, Path], ...]
    folders: tuple[tuple[str, Path], ...]
    inputs: tuple[str, ...]
    input_files: tuple[Path, ...]

    @classmethod
    def of_job(cls, job: Job, *states: StateFolder) -> ProtectedFiles:
        """Return the protected files of a job: its job file, model, input, results and state.

        Raises the same errors as listing the input.

        Args:
            job: The job.
            states: The state folders of its results.
        """
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
        """Return why no output file may be written to a path, as the end of a sentence, or None if it may.

        Args:
            path: The path, with symbolic links resolved.
        """
        for what, file in (*self.files, *(("an input of the job", file) for file in self.input_files)):
            if _same(path, file):
                return f"is {what} ({file})"
        for what, folder in self.folders:
            real = Path(os.path.realpath(folder))
            if real.is_relative_to(path):
                return f"contains {what} ({folder})"
            if path.is_relative_to(real):
                return f"is inside {what} ({folder})"
        if would_read(self.inputs, path):
            return "is where the job looks for input: the next run would read it"
        return _others_folder(path)


def _same(path: Path, other: Path) -> bool:
    # Hard links have the same inode
    if path == Path(os.path.realpath(other)):
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _others_folder(path: Path) -> str | None:
    for parent in path.parents:
        if parent.name.startswith(STATE_PREFIX):
            return f"is inside a state folder of batchinfer ({parent})"
        if (parent / MANIFEST_NAME).exists():
            return f"is inside a result folder ({parent})"
    return None


@dataclass(frozen=True, slots=True)
class _FileState:
    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int


class OutputFile:
    """An output file of a job that an option of the command line names, such as an OpenAI batch file.

    `probe` and `writing` require the lock of the result. Runs for other results of the job (other dates,
    trials) may write to the same path at the same time.
    """

    def __init__(
        self,
        location: Location,
        option: str,
        protected: ProtectedFiles,
        state: StateFolder,
        *,
        replace: bool = False,
    ) -> None:
        """Describe an output file. Nothing is checked or written.

        Args:
            location: The path.
            option: The command-line option before the path, for messages.
            protected: Files that must not be replaced.
            state: The state folder of the result.
            replace: True if a file that this job did not write may be replaced.
        """
        self.path = Path(os.path.realpath(location.local))
        self._option, self._protected, self._state, self._replace = option, protected, state, replace
        self._ops = state.ops
        self._temporary = self._temporary_of(state.path)
        self._digested: tuple[_FileState, Digest] | None = None

    def _temporary_of(self, part: Path) -> Path:
        # The name stays the same after a kill
        ours = _mark(self._state.job, self.path)
        return self.path.parent / f".batchinfer-{ours}-{_mark(part)}{TEMPORARY}"

    def check(self) -> None:
        """Check that the output file may be written, or replaced if it exists. Nothing is changed.

        Raises:
            OutputConflict: It may not be written.
            StorageError: The existing file cannot be read.
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
                f"its folder {self.path.parent} does not exist; create it, or choose another file"
            )
        self._ours()

    def probe(self) -> None:
        """Write and remove a temporary file, to check that the folder of the output file is writable.

        Temporary files of killed runs are removed as well. Raises StorageError.
        """
        self._sweep()
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            file.write(bytes(_PROBE_BYTES))
            file.flush_to_disk()
        finally:
            file.abandon()

    def check_space(self, needed_bytes: int) -> None:
        """Raise StorageError if the disk of the output file has less than `needed_bytes` free."""
        needing = f"{self._option} {self.path}: the file needs at least"
        check_free_space(self.path.parent, needed_bytes, needing, "choose a file on another disk")

    def _sweep(self) -> None:
        # Temporary files for other dates are removed, too
        with self._state.lock_shared():  # no other run can take its lock now
            held = {self._temporary_of(part) for part in self._state.parts_in_use()}
            with storage(self.path.parent, "clear"):
                for left in self.path.parent.glob(
                    f".batchinfer-{_mark(self._state.job, self.path)}-*{TEMPORARY}"
                ):
                    if left not in held:
                        self._ops.unlink(left)

    @contextmanager
    def writing(self) -> Iterator[DurableFile]:
        """Yield a temporary file for writing, which replaces the output file when the block ends.

        It is discarded after an exception.

        Raises:
            OutputConflict: Another file was put there since `check`.
            StorageError: The file cannot be written.
        """
        file = DurableFile(self.path, self._ops, self._temporary)
        try:
            yield file
            file.flush_to_disk()  # slow, so it is done before other runs have to wait
            self.check()
            with self._state.lock_shared():
                self._write_entries([file.commit(self._remember)])
        finally:
            file.close()

    def _conflict(self, why: str) -> OutputConflict:
        return OutputConflict(f"{self._option} {self.path}: {why}")

    def _ours(self) -> Digest | None:
        for _ in range(_MAX_CHECKS):
            there = self._look()
            if there is None:
                return None
            known = self._entries().get(str(self.path), [])
            sizes_match = there.bytes in {one.bytes for one in known}
            digest = self._digest(there) if self._replace or sizes_match else None
            if self._look() != there:
                continue  # another run replaced the file, so the list that was read may be outdated
            if digest is None or not (self._replace or digest in known):
                raise self._stranger()
            return digest
        raise self._stranger()

    def _look(self) -> _FileState | None:
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
        return _FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def _digest(self, there: _FileState) -> Digest:
        # Cached, since other runs wait during the second check
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
        # Before the rename, the new digest is recorded next to the old one: after a crash, either is known
        there = self._ours()
        self._write_entries([written] if there is None else [there, written])

    def _write_entries(self, ours: list[Digest]) -> None:
        # The entries of other files are kept
        kept = {path: found for path, found in self._entries().items() if os.path.exists(path)}
        kept[str(self.path)] = ours
        listed = {path: [asdict(one) for one in found] for path, found in kept.items()}
        write_json(self._state.written, listed, self._ops)


def _digest(raw: object) -> Digest:
    # An invalid value gives a digest that no file has
    if isinstance(raw, dict) and isinstance(raw.get("bytes"), int):
        return Digest(raw["bytes"], str(raw.get("sha256")))
    return Digest(-1, "")


def _mark(*paths: Path) -> str:
    return hashlib.sha256("\0".join(os.path.realpath(path) for path in paths).encode()).hexdigest()[:16]
