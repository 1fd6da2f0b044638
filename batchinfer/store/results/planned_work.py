"""Runs that share a store announce their plans: a run can then wait for the answers of another run.

    completions/planned/lock             held while a run announces its plan
    completions/planned/<time>-<pid>.json   names a run's plans; the run holds its lock until its process ends

A run only sees plans that were announced before its own, so runs never wait for each other in a circle.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.duck import connection, parquet
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.filesystem.json_files import read_strings
from batchinfer.filesystem.state import is_held

_FOLDER = "planned"
_WAIT_S = 0.2  # seconds between checks of another run


@dataclass(frozen=True, slots=True)
class OtherRun:
    """Another run that uses the same store, and has announced which answers it computes.

    Attributes:
        announcement: The file of the announcement. The process of the run holds its lock.
        plans: The run's plans: Parquet files with the work keys in the column `key`.
    """

    announcement: Path
    plans: tuple[Path, ...]

    @property
    def is_running(self) -> bool:
        """Return True while the process of the run holds the lock of its announcement. Raises StorageError."""
        return is_held(self.announcement)


class Announcement:
    """The announcement, to other runs that use the same store, of the answers that this run computes.

    Its attribute `others` lists the running runs that announced their plans earlier.
    """

    def __init__(self, folder: Path, plans: Sequence[Path], ops: FileOps) -> None:
        self._folder, self._plans = folder, [*plans]
        with storage(folder, "announce a plan in"):
            ops.mkdir(folder, 0o700)
            with self._gate():
                self.others = list(_running(folder, ops))
                self.path = folder / f"{time.time_ns():020d}-{os.getpid()}.json"
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                self._write()

    def add(self, plan: Path) -> None:
        """Add another plan of this run to the announcement, for rows that were read later.

        Raises StorageError.
        """
        self._plans.append(plan)
        with storage(self._folder, "announce a plan in"), self._gate():
            self._write()

    def close(self) -> None:
        """Release the lock of the announcement. The file stays."""
        os.close(self._fd)

    def _write(self) -> None:
        os.ftruncate(self._fd, 0)
        named = {f"plan{number or ''}": str(plan) for number, plan in enumerate(self._plans)}
        os.pwrite(self._fd, json.dumps(named).encode(), 0)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        gate = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield
        finally:
            os.close(gate)


@contextmanager
def announce_plans(store: Path, plans: Sequence[Path], ops: FileOps) -> Iterator[Announcement]:
    """Announce to other runs, while the block runs, which answers this run computes.

    Another run with the same requests can then wait for these answers. Raises StorageError.

    Args:
        store: The folder of the shared store.
        plans: The Parquet files of this run's plans, which must not change.
        ops: File operations.
    """
    announcement = Announcement(store / _FOLDER, plans, ops)
    try:
        yield announcement
    finally:
        announcement.close()
        with storage(announcement.path, "remove"):
            ops.unlink(announcement.path)


def is_another_run_computing(store: Path) -> bool:
    """Return True if another run that uses the same store has announced a plan and is running."""
    return any(OtherRun(path, ()).is_running for path in (store / _FOLDER).glob("*.json"))


def _running(folder: Path, ops: FileOps) -> Iterator[OtherRun]:
    # The announcements of killed runs are removed
    for path in sorted(folder.glob("*.json")):
        other = OtherRun(path, tuple(Path(plan) for plan in read_strings(path).values()))
        if other.is_running:
            yield other
        else:
            ops.unlink(path)


def find_similar_runs(plan: Path, others: Sequence[OtherRun], spill: Path) -> list[OtherRun]:
    """Return the runs whose answers are worth waiting for.

    They share at least half of this plan's work keys, and at least half of their own. A trial of 20 rows must
    not wait for a run of a million rows.

    Args:
        plan: The Parquet file of this run's plan.
        others: The runs to consider.
        spill: Folder for temporary files.
    """
    found = []
    for other in others:
        try:
            same = _in_both(plan, other.plans, spill) if other.plans else 0
            least = max(_rows(plan), sum(map(_rows, other.plans))) / 2
        except (StorageError, OSError):
            if other.is_running and all(plan.exists() for plan in other.plans):
                raise
            continue  # the run has ended and removed its plan
        if same and same >= least:
            found.append(other)
    return found


def wait_for(others: Sequence[OtherRun], tick: Callable[[], None]) -> None:
    """Wait until none of the other runs is running.

    Args:
        others: The runs.
        tick: Called every 0.2 seconds.
    """
    while any(other.is_running for other in others):
        time.sleep(_WAIT_S)
        tick()


def _rows(plan: Path) -> int:
    return int(pq.read_metadata(plan).num_rows)


def _in_both(plan: Path, others: Sequence[Path], spill: Path) -> int:
    with connection(spill) as database:
        query = f"SELECT count(*) FROM {parquet([plan])} a SEMI JOIN {parquet(others)} b ON a.key = b.key"
        return int(database.execute(query).fetchall()[0][0])
