"""The state folder: data that a job keeps between runs, in a hidden folder next to its results.

    /d/res                          the results
    /d/.batchinfer-res/             mode 0700, since it has prompts
        state.json                  {"format": 1}
        state.lock                  held briefly while a run takes its lock or changes shared files
        report.lock                 shared by all runs that write report tables
        completions/                finished work by key (or `cache.path`, shared between jobs)
        fingerprints.json           sha256 of weight files, and the results of scans of GPTQ's zero points
        store.json                  the `cache.path` of the job's last run, so the store is found without the job file
        kept/                       the kept index: prepared rows of the last run, without their tokens
        int4/<digest>/              the model's weights in int4, calibrated for the job, and the loss of accuracy; a
                                    complete folder is renamed to this name
        quality.json                how much quantised weights change predictions, as measured, by a digest of weights,
                                    quantisation and prompt
        result_files.json           the result that was published last, with fingerprints of its files
        written.json                the files that the job wrote elsewhere, with their digests
        lock                        locked with flock; has the pid of the run that holds it
        scratch/<index id>/         index, tokens, passthrough, plan: removed once the results are published
        staging/next/               the results that are being written
        generations/<generation>/   replaced results, kept for an hour
        engine_errors.log           the tracebacks of engines that died
        progress.json               the progress of the run, written every few seconds, and how it ended
        published.json              the input files of the published result
        made_by.json                the command that published the result: its job file and options

It is not inside the results folder, because DuckDB's `**` enters hidden folders.

If a job has several results (one per ${date}, or a trial), they have a common root, `/d/res`, and share the entries up
to `written.json`. The entries from `lock` on belong to one result. A result that is not the root has its own ones in

        results/<path of the result from /d>/

which is called a part of the state folder. It is removed after no run has used it for a day.
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
from batchinfer.filesystem.json_files import read_strings, write_strings
from batchinfer.filesystem.location import Location
from batchinfer.job import Job

_log = logging.getLogger(__name__)

STATE_FORMAT = 1
KEEP_GENERATIONS_S = 3600.0
KEEP_IDLE_S = 86400.0  # seconds after the last run until the part of a result is removed
STATE_PREFIX = ".batchinfer-"  # the name of the state folder is this prefix and the name of the root
_RESULTS = "results"
_SHARED = "cache.path"
_NAME_BYTES = 200  # maximum bytes of a part's name; file systems allow 255


class StateFolder:
    """The state folder of a job, seen from one of its results: paths, locks and clean-up.

    The state folder is a hidden folder next to the results that makes runs resumable. If a job has several
    results, each has a subfolder of its own, which is called a part of the state folder.
    """

    def __init__(
        self,
        results: Path,
        *,
        root: Path | None = None,
        cache: Path | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Compute the paths of a job's state. Nothing is created.

        Args:
            results: The result folder.
            root: The folder above all results of the job, if it has several. The state folder is next to it.
                None: `results`.
            cache: The `cache.path` of the job. None: the store is in the state folder.
            ops: File operations.
        """
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
        self.quality = self.job / "quality.json"
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
        """Return the location at which the job's result is published."""
        return Location.at(self.results)

    @property
    def has_published(self) -> bool:
        """Return True if a run of this job has published the result of this state folder."""
        return self.made_by.exists() or self.published.exists()

    def _name(self) -> str:
        way = os.path.relpath(self.results, self.root.parent)
        name = way.replace("%", "%25").replace("/", "%2F")
        if len(os.fsencode(name)) <= _NAME_BYTES:
            return name
        return hashlib.sha256(os.fsencode(way)).hexdigest()

    def is_on_other_disk(self) -> bool:
        """Return True if results and state are on different disks. A rename then cannot publish results."""
        return _device(self.path) != _device(self.results.parent)

    @property
    def shares_store(self) -> bool:
        """Return True if the job's answers are stored in a `cache.path`, which other jobs may use."""
        return self.completions != self._own_store

    def remember_store(self) -> None:
        """Record the folder in which this run stores its answers, for `of_last_run`. Raises StorageError."""
        used = {_SHARED: str(self.completions)} if self.shares_store else {}
        if read_strings(self._store_note) != used:
            with self.lock_shared():
                write_strings(self._store_note, used, self.ops)

    def of_last_run(self) -> StateFolder:
        """Return the same state folder, but with the store of answers that the job's last run recorded.

        Without a record, the store is inside the state folder.
        """
        shared = read_strings(self._store_note).get(_SHARED)
        cache = None if shared is None else Path(shared)
        return StateFolder(self.results, root=self.root, cache=cache, ops=self.ops)

    @contextmanager
    def lock(self) -> Iterator[StateFolder]:
        """Create the state folder if needed, and hold the lock of the result while the block runs.

        While it is held, no other run can write the same result. It is released if the process dies.

        Raises:
            Locked: Another run holds it.
            StorageError: A file cannot be written, or a newer version of batchinfer wrote the state (exit
                code 74).
        """
        self._create()
        with self.lock_shared():
            if self.path != self.job:  # created under this lock, since other runs remove idle parts
                with storage(self.path, "create"):
                    self.ops.mkdir(self.path, 0o700)
            fd = self._open_lock()
        try:
            yield self
        finally:
            os.close(fd)

    @contextmanager
    def lock_shared(self) -> Iterator[None]:
        """Hold the lock of the files that all results of the job share, while the block runs.

        Other runs of the job that need the lock wait for it.
        """
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
        # Writes nothing, as the state may be read-only
        with storage(self._gate, "lock"), ExitStack() as stack:
            if (fd := _open_for_reading(self._gate)) is not None:  # without the file, no run has ever started
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield

    def purge_scratch(self, keep: str | None = None) -> None:
        """Remove the scratch folders of the result, which have its index, tokens and plan.

        Args:
            keep: The identity of an index whose folder stays. None: all folders are removed.
        """
        for folder in _entries(self.scratch):
            if folder.name != keep:
                self._remove(folder)

    def remove_old_generations(self, now: float | None = None, keep_s: float = KEEP_GENERATIONS_S) -> int:
        """Remove replaced results older than `keep_s` seconds, and return their number.

        Args:
            now: The current Unix time. None: read the clock.
            keep_s: Minimum age in seconds of results to remove.
        """
        old = self.old_generations(now, keep_s)
        for folder in old:
            self._remove(folder)
        return len(old)

    def check_writable(self) -> None:
        """Check that this user may write to the folders of the state, the store and the results.

        Raises:
            StorageError: A folder cannot be written.
            OutputConflict: The state folder is a symbolic link. The owner of its target could read the
                prompts.
        """
        if self.job.is_symlink():
            raise OutputConflict(
                f"{self.job}: is a symbolic link, but the state of a job must be a folder of its own; remove "
                f"the link, or put the folder that it leads to ({os.path.realpath(self.job)}) in its place"
            )
        for folder in (self.path, self.completions, self.results):
            place = next(one for one in (folder, *folder.parents) if one.exists())
            if not place.is_dir():
                raise StorageError(f"{place}: is a file, but {folder} must be a folder")
            if not os.access(place, os.W_OK | os.X_OK):
                raise StorageError(
                    f"{place}: cannot be written by this user, but {folder} must be created there"
                )

    def old_generations(self, now: float | None = None, keep_s: float = KEEP_GENERATIONS_S) -> list[Path]:
        """Return the folders of replaced results older than `keep_s` seconds.

        Args:
            now: The current Unix time. None: read the clock.
            keep_s: Minimum age in seconds.
        """
        limit = (time.time() if now is None else now) - keep_s
        return [folder for folder in _entries(self.generations) if folder.stat().st_mtime < limit]

    def idle_parts(self, now: float | None = None, keep_s: float = KEEP_IDLE_S) -> list[Path]:
        """Return the subfolders of the job's other results that no run has used recently.

        Args:
            now: The current Unix time. None: read the clock.
            keep_s: Minimum seconds since a run last used the subfolder.
        """
        limit = (time.time() if now is None else now) - keep_s
        return [
            folder
            for folder in _entries(self.job / _RESULTS)
            if folder != self.path and _last_used(folder) < limit
        ]

    def parts_in_use(self) -> list[Path]:
        """Return the subfolders of results that runs are writing now, including this run's result.

        A subfolder is in use if a run holds its lock. Call this within `lock_shared`, so that no other run
        takes a lock in the meantime.
        """
        return [part for part in (self.job, *_entries(self.job / _RESULTS)) if is_held(part / "lock")]

    def is_running(self, part: Path) -> bool:
        """Return True if a run is writing the result with the subfolder `part`, that is, holds its lock.

        A run that starts at the same time waits until this method returns.
        """
        with self._no_run_starts():
            return is_held(part / "lock")

    def recorded_parts(self) -> list[Path]:
        """Return the subfolders of results that have a progress file, the most recently written one first.

        If this state folder's own result has a progress file, only its subfolder is returned.
        """
        if self.progress.exists():
            return [self.path]
        files = [part / self.progress.name for part in (self.job, *_entries(self.job / _RESULTS))]
        found = [file for file in files if file.exists()]
        return [file.parent for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)]

    def remove_idle(self, now: float | None = None) -> int:
        """Remove the subfolders of other results that no run has used for a day, and return their number.

        Args:
            now: The current Unix time. None: read the clock.
        """
        if not self.idle_parts(now):
            return 0
        with self.lock_shared():  # two runs must not remove the same folder
            return sum(self._remove_unlocked(folder) for folder in self.idle_parts(now))

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
        """Check that the disk of the state folder has `needed_bytes` free. Raises StorageError."""
        needing = f"{self.path}: the job needs about"
        check_free_space(self.path, needed_bytes, needing, "point output.path at another disk")

    def _create(self) -> None:
        with storage(self.path, "create"):
            self.ops.mkdir(self.job.parent)
            self.ops.mkdir(self.job, 0o700)
            self.job.chmod(0o700)  # the folder may have existed with another mode

    def _open_lock(self) -> int:
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
        """Raise StorageError if a newer version of batchinfer wrote the state folder. Nothing is written.

        The version is read from `state.json`. A missing or damaged file is accepted; a failure of the disk
        raises StorageError.
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
    """Return the state folder of a job's result. Raises JobFileError if the result is on another disk."""
    state = StateFolder(job.output.path, root=job.results_root, cache=job.cache.path)
    if state.is_on_other_disk():
        raise job.mistake(
            "output.path",
            f"the results ({state.results}) would be on another disk than the job's state ("
            f"{state.job}); add a folder on the disk of the results to the path: "
            f"{job.results_root / job.results_root.name}/${{date}}",
        )
    return state


def _device(path: Path) -> int:
    there = next(place for place in (path, *path.parents) if place.exists())
    with storage(there, "look at"):
        return there.stat().st_dev


def _last_used(folder: Path) -> float:
    lock = folder / "lock"
    try:
        return (lock if lock.exists() else folder).stat().st_mtime
    except FileNotFoundError:  # another run is removing it
        return float("inf")


def _try_lock(path: Path) -> int | None:
    with storage(path, "open"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_held(lock: Path) -> bool:
    """Return True if a process holds the lock of a lock file, which need not exist. Writes nothing."""
    with storage(lock, "look at"):
        fd = _open_for_reading(lock)
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def _open_for_reading(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _format_of(marker: Path) -> int | None:
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
