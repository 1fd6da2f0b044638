"""Runs that share a store announce what they are about to compute, so that one can wait for another's answers.

    completions/planned/lock             held for the moment in which a run announces its plan
    completions/planned/<time>-<pid>.json   names a run's plans; the run holds its lock, which ends with the process

A run sees what was announced before its own: nobody waits for somebody who waits for it.
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
from batchinfer.filesystem.remembered import read_strings
from batchinfer.filesystem.state import is_held

_FOLDER = "planned"
_WAIT_S = 0.2  # between looks at another run


@dataclass(frozen=True, slots=True)
class OtherRun:
    """A run that announced its plans, Parquet files with a column `key`."""

    announcement: Path
    plans: tuple[Path, ...]

    @property
    def at_work(self) -> bool:
        """True while the run's process holds its announcement. Raises StorageError."""
        return is_held(self.announcement)


class Announcement:
    """The announcement of a run's plans. `others`: the runs that had announced theirs before."""

    def __init__(self, folder: Path, plans: Sequence[Path], ops: FileOps) -> None:
        self._folder, self._plans = folder, [*plans]
        with storage(folder, "announce a plan in"):
            ops.mkdir(folder, 0o700)
            with self._gate():
                self.others = list(_at_work(folder, ops))
                self.path = folder / f"{time.time_ns():020d}-{os.getpid()}.json"
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                self._write()

    def add(self, plan: Path) -> None:
        """Name one more plan, of rows that were read meanwhile. Raises StorageError."""
        self._plans.append(plan)
        with storage(self._folder, "announce a plan in"), self._gate():
            self._write()

    def close(self) -> None:
        """Hold the announcement no longer."""
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
def announced(store: Path, plans: Sequence[Path], ops: FileOps) -> Iterator[Announcement]:
    """Other runs see these plans while the block lasts, and those that are added. Raises StorageError.

    The files must not change meanwhile.
    """
    announcement = Announcement(store / _FOLDER, plans, ops)
    try:
        yield announcement
    finally:
        announcement.close()
        with storage(announcement.path, "remove"):
            ops.unlink(announcement.path)


def is_another_at_work(store: Path) -> bool:
    """Whether a run that shares the store has announced its plan, and works on it. Changes nothing."""
    return any(OtherRun(path, ()).at_work for path in (store / _FOLDER).glob("*.json"))


def _at_work(folder: Path, ops: FileOps) -> Iterator[OtherRun]:
    """Yield the runs that are at work; files left by killed runs are removed."""
    for path in sorted(folder.glob("*.json")):
        other = OtherRun(path, tuple(Path(plan) for plan in read_strings(path).values()))
        if other.at_work:
            yield other
        else:
            ops.unlink(path)


def alike(plan: Path, others: Sequence[OtherRun], spill: Path) -> list[OtherRun]:
    """The runs that compute mostly the same as this plan: at least half of it, and half of theirs.

    Otherwise waiting may take longer than computing: a trial of 20 rows waits for no run of a million.
    """
    found = []
    for other in others:
        try:
            same = _in_both(plan, other.plans, spill) if other.plans else 0
            least = max(_rows(plan), sum(map(_rows, other.plans))) / 2
        except (StorageError, OSError):
            if other.at_work and all(plan.exists() for plan in other.plans):
                raise
            continue  # it is done by now, and its plan removed
        if same and same >= least:
            found.append(other)
    return found


def wait_for(others: Sequence[OtherRun], tick: Callable[[], None]) -> None:
    """Return once none of them is at work any more, however it ended; `tick` is called meanwhile."""
    while any(other.at_work for other in others):
        time.sleep(_WAIT_S)
        tick()


def _rows(plan: Path) -> int:
    return int(pq.read_metadata(plan).num_rows)


def _in_both(plan: Path, others: Sequence[Path], spill: Path) -> int:
    with connection(spill) as database:
        query = f"SELECT count(*) FROM {parquet([plan])} a SEMI JOIN {parquet(others)} b ON a.key = b.key"
        return int(database.execute(query).fetchall()[0][0])
