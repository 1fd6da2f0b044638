"""The state folder: what a job keeps between runs, in a hidden sibling of its results.

    /d/res                          the results
    /d/.batchinfer-res/             mode 0700, since it holds prompts
        state.json                  {"format": 1}
        state.lock                  held for the moment in which a run takes its lock or changes what all share
        report.lock                 shared by all runs that write report tables
        completions/                finished work by key (or `cache.path`, shared between jobs)
        fingerprints.json           sha256 of weight files, and the results of scans of GPTQ's zero points
        store.json                  the `cache.path` of the job's last run: the store is found without the job file
        kept/                       what the last run knew of its rows, without their tokens
        int4/<digest>/              the model's weights in int4, calibrated for the job, and what that lost; a folder
                                    takes this name once it is whole
        result_files.json           which result was published last, and what its files were made of
        written.json                which files the job wrote elsewhere, with their digests
        lock                        flock target; holds the pid of the run that has it
        scratch/<index id>/         index, tokens, passthrough, plan: purged once the results are published
        staging/next/               the results being written
        generations/<generation>/   the results that were replaced, kept for an hour
        engine_errors.log           the tracebacks of engines that died
        progress.json               how far the run is, written every few seconds; how it ended, once it has
        published.json              which input files the published result was made of
        made_by.json                the command that published the result: its job file and options

A sibling and not a child: DuckDB's `**` enters hidden folders.

Where a job has several results (one for each ${date}, a trial's), they have one root, `/d/res`, and share all up to
`written.json`. From `lock` on everything belongs to one result: a result that is not the root has its own in

        results/<path of the result from /d>/

which is removed once no run has used it for a day.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from batchinfer.core.errors import Locked, OutputConflict, StorageError
from batchinfer.filesystem.durable import FileOps, check_free_space, storage, write_json
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.remembered import read_strings, write_strings
from batchinfer.job import Job

_log = logging.getLogger(__name__)

STATE_FORMAT = 1
KEEP_GENERATIONS_S = 3600.0
KEEP_IDLE_S = 86400.0  # a result's own part of the state, after its last run
STATE_PREFIX = ".batchinfer-"  # of the folder's name; the root's follows
_RESULTS = "results"
_SHARED = "cache.path"
_NAME_BYTES = 200  # file systems take names of 255


class StateFolder:
    """The paths of a job's state as a run for one of its results sees them, its lock, and what is swept from it."""

    def __init__(
        self,
        results: Path,
        *,
        root: Path | None = None,
        cache: Path | None = None,
        ops: FileOps | None = None,
    ) -> None:
        self.results = results.absolute()
        self.root = root.absolute() if root else self.results
        self.job = self.root.parent / f"{STATE_PREFIX}{self.root.name}"
        self.path = self.job if self.root == self.results else self.job / _RESULTS / self._name()
        self.ops = ops or FileOps()
        self._own_store = self.job / "completions"
        self.completions = cache.absolute() if cache else self._own_store
        self._store_note = self.job / "store.json"
        self.report_lock = self.job / "report.lock"
        self.fingerprints = self.job / "fingerprints.json"
        self.kept = self.job / "kept"
        self.int4 = self.job / "int4"
        self.result_files = self.job / "result_files.json"
        self.written = self.job / "written.json"
        self._marker = self.job / "state.json"
        self._gate = self.job / "state.lock"
        self.lock_path = self.path / "lock"
        self.scratch = self.path / "scratch"
        self.staging = self.path / "staging"
        self.generations = self.path / "generations"
        self.published = self.path / "published.json"
        self.made_by = self.path / "made_by.json"
        self.progress = self.path / "progress.json"
        self.engine_errors = self.path / "engine_errors.log"

    @property
    def destination(self) -> Location:
        """Return the location at which the result is published."""
        return Location.at(self.results)

    @property
    def has_published(self) -> bool:
        """Whether a run of this job has put this result in its place."""
        return self.made_by.exists() or self.published.exists()

    def _name(self) -> str:
        """A file name that says where the result is from the folder of the root."""
        way = os.path.relpath(self.results, self.root.parent)
        name = way.replace("%", "%25").replace("/", "%2F")
        if len(os.fsencode(name)) <= _NAME_BYTES:
            return name
        return hashlib.sha256(os.fsencode(way)).hexdigest()

    def other_disk(self) -> bool:
        """Whether the results lie on another disk than the state, so that no rename can publish them."""
        return _device(self.path) != _device(self.results.parent)

    @property
    def shares_store(self) -> bool:
        """Whether the answers are stored at a `cache.path`."""
        return self.completions != self._own_store

    def remember_store(self) -> None:
        """Note where this run stores its answers. Raises StorageError."""
        used = {_SHARED: str(self.completions)} if self.shares_store else {}
        if read_strings(self._store_note) != used:
            with self.exclusively():
                write_strings(self._store_note, used, self.ops)

    def of_last_run(self) -> StateFolder:
        """Return this state with the store of the job's last run, or with its own store if no run has noted another."""
        shared = read_strings(self._store_note).get(_SHARED)
        cache = None if shared is None else Path(shared)
        return StateFolder(self.results, root=self.root, cache=cache, ops=self.ops)

    @contextmanager
    def lock(self) -> Iterator[StateFolder]:
        """Create the folder if need be and hold its lock. Raises Locked, StorageError (74) for a newer
        format.

        The lock is the kernel's: it ends with the process, however that ends.
        """
        self._create()
        with self.exclusively():
            if self.path != self.job:  # only now: another run removes what was idle
                with storage(self.path, "create"):
                    self.ops.mkdir(self.path, 0o700)
            fd = self._open_lock()
        try:
            yield self
        finally:
            os.close(fd)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold back the job's other runs for the moment that it takes to change what they share."""
        with storage(self._gate, "open"):
            fd = os.open(self._gate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage(self._gate, "lock"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _no_run_starts(self) -> Iterator[None]:
        """Hold back runs that start, without writing: the state may be read-only, or another user's."""
        with storage(self._gate, "lock"), ExitStack() as stack:
            if (fd := _opened_to_read(self._gate)) is not None:  # else no run has ever started
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield

    def purge_scratch(self, keep: str | None = None) -> None:
        """Remove prompts, tokens, index and plan, but for the index with the identity `keep`."""
        for folder in _entries(self.scratch):
            if folder.name != keep:
                self._remove(folder)

    def remove_old_generations(self, now: float | None = None, keep_s: float = KEEP_GENERATIONS_S) -> int:
        """Remove replaced results older than `keep_s` seconds; how many there were. `now` is Unix time."""
        old = self.old_generations(now, keep_s)
        for folder in old:
            self._remove(folder)
        return len(old)

    def check_writable(self) -> None:
        """Check that the folders of the state, the store and the results can be written.

        Raises:
            StorageError: A folder cannot be written.
            OutputConflict: The state folder is a link. The owner of its target could read the prompts.
        """
        if self.job.is_symlink():
            raise OutputConflict(
                f"{self.job}: is a symbolic link, but the state of a job must be a folder of its own; remove "
                f"the link, or put the folder that it leads to ({os.path.realpath(self.job)}) in its place"
            )
        for folder in (self.path, self.completions, self.results):
            place = next(one for one in (folder, *folder.parents) if one.exists())
            if not place.is_dir():
                raise StorageError(f"{place}: is a file; {folder} is to be a folder there")
            if not os.access(place, os.W_OK | os.X_OK):
                raise StorageError(f"{place}: cannot be written by this user; {folder} is to lie there")

    def old_generations(self, now: float | None = None, keep_s: float = KEEP_GENERATIONS_S) -> list[Path]:
        """Replaced results older than `keep_s` seconds."""
        limit = (time.time() if now is None else now) - keep_s
        return [folder for folder in _entries(self.generations) if folder.stat().st_mtime < limit]

    def idle(self, now: float | None = None, keep_s: float = KEEP_IDLE_S) -> list[Path]:
        """The parts of this job's other results that no run has used for `keep_s` seconds. `now` is Unix time."""
        limit = (time.time() if now is None else now) - keep_s
        return [
            folder
            for folder in _entries(self.job / _RESULTS)
            if folder != self.path and _last_used(folder) < limit
        ]

    def parts_in_use(self) -> list[Path]:
        """The parts, this one's included, that runs hold now. Call it within `exclusively`: then it stays true."""
        return [part for part in (self.job, *_entries(self.job / _RESULTS)) if is_held(part / "lock")]

    def is_running(self, part: Path) -> bool:
        """Return True if a run holds the lock of a part. A run that starts at this moment waits for the answer."""
        with self._no_run_starts():
            return is_held(part / "lock")

    def recorded_parts(self) -> list[Path]:
        """The part of this result, if runs have recorded their progress there; else all such parts of the job, the
        one that was written last first."""
        if self.progress.exists():
            return [self.path]
        files = [part / self.progress.name for part in (self.job, *_entries(self.job / _RESULTS))]
        found = [file for file in files if file.exists()]
        return [file.parent for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)]

    def remove_idle(self, now: float | None = None) -> int:
        """Remove what `idle` names, but for what a run holds at this moment; how many there were."""
        if not self.idle(now):
            return 0
        with self.exclusively():  # two that remove the same would trip over each other
            return sum(self._remove_unlocked(folder) for folder in self.idle(now))

    def _remove_unlocked(self, folder: Path) -> bool:
        fd = _try_lock(folder / "lock")
        if fd is None:
            return False
        try:
            self._remove(folder)
        finally:
            os.close(fd)
        return True

    def check_space(self, needed_bytes: int) -> None:
        """Raises StorageError when the disk of the state folder has less than `needed_bytes` free."""
        needing = f"{self.path}: the job needs about"
        check_free_space(self.path, needed_bytes, needing, "point output.path at another disk")

    def _create(self) -> None:
        with storage(self.path, "create"):
            self.ops.mkdir(self.job.parent)
            self.ops.mkdir(self.job, 0o700)
            self.job.chmod(0o700)  # a folder that was there already, or a loose umask

    def _open_lock(self) -> int:
        """The descriptor that holds the lock, in a state of a format that we know."""
        with storage(self.lock_path, "open"):
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(fd)
            self._check_format()
        except BaseException:
            os.close(fd)
            raise
        return fd

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
        self.refuse_newer()
        if _format_of(self._marker) is None:
            if self._marker.exists():
                _log.warning("%s is damaged and will be written again; stored answers are kept", self._marker)
            write_json(self._marker, {"format": STATE_FORMAT}, self.ops)

    def refuse_newer(self) -> None:
        """Check that this version can read the state, and write nothing.

        A missing or damaged `state.json` is no reason to refuse: it holds nothing but the format, and all files with
        answers state theirs as well.

        Raises:
            StorageError: A newer version of batchinfer wrote the folder, or `state.json` cannot be read.
        """
        found = _format_of(self._marker)
        if found is not None and found > STATE_FORMAT:
            raise StorageError(
                f"{self._marker}: state format {found}, this version knows up to {STATE_FORMAT}; use the batchinfer "
                f"that wrote it, or remove the folder {self.job} to start over, which deletes its stored answers"
            )

    def _remove(self, folder: Path) -> None:
        with storage(folder, "remove"):
            self.ops.remove_tree(folder)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def state_of(job: Job) -> StateFolder:
    """The state of a job, for the result that it publishes. Raises JobFileError where that lies on another disk."""
    state = StateFolder(job.output.path, root=job.results_root, cache=job.cache.path)
    if state.other_disk():
        raise job.mistake(
            "output.path",
            f"the results ({state.results}) would lie on another disk than the job's state, which lies in "
            f"{state.job}; put a folder in between, on the disk of the results: "
            f"{job.results_root / job.results_root.name}/${{date}}",
        )
    return state


def _device(path: Path) -> int:
    """The disk of a path, or of the folder above it that is there."""
    there = next(place for place in (path, *path.parents) if place.exists())
    with storage(there, "look at"):
        return there.stat().st_dev


def _last_used(folder: Path) -> float:
    """When a run last took the lock there, in Unix time."""
    lock = folder / "lock"
    try:
        return (lock if lock.exists() else folder).stat().st_mtime
    except FileNotFoundError:  # another run removes it at this moment: nothing is left to do
        return float("inf")


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock at `path`; None while a run holds it."""
    with storage(path, "open"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_held(lock: Path) -> bool:
    """Return True if a run holds the lock. Writes nothing."""
    with storage(lock, "look at"):
        fd = _opened_to_read(lock)
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def _opened_to_read(path: Path) -> int | None:
    """Return a descriptor of the file; None if there is none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _format_of(marker: Path) -> int | None:
    """Return the format that the file states; None if it is missing or damaged. Raises StorageError."""
    if marker.is_dir():
        raise StorageError(
            f"{marker}: is a folder where a file belongs; remove it and run the same command again: batchinfer writes "
            "the file again, and keeps all stored answers"
        )
    with storage(marker, "read"):
        try:
            value = json.loads(marker.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
    found = value.get("format") if isinstance(value, dict) else None
    return found if type(found) is int and found >= STATE_FORMAT else None
