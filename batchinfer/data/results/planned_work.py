"""Runs that share a store announce what they are about to compute, so that one can wait for another's answers.

    completions/planned/lock             held for the moment in which a run announces its plan
    completions/planned/<time>-<pid>.json   names a run's plan; the run holds its lock, which ends with the process

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
from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import FileOps, storage
from batchinfer.data.storage.remembered import read_strings

_FOLDER = "planned"
_WAIT_S = 0.2  # between looks at another run


@dataclass(frozen=True, slots=True)
class OtherRun:
    """A run that announced its plan, a Parquet file with a column `key`."""

    announcement: Path
    plan: Path

    @property
    def at_work(self) -> bool:
        """Whether its process still holds its announcement."""
        try:
            fd = os.open(self.announcement, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


@contextmanager
def announced(store: Path, plan: Path, ops: FileOps) -> Iterator[list[OtherRun]]:
    """Other runs see this plan while the block lasts, which gets those that were announced before. Raises StorageError.

    The file `plan` must not change meanwhile.
    """
    folder = store / _FOLDER
    with storage(folder, "announce a plan in"):
        ops.mkdir(folder, 0o700)
        gate = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            others = list(_at_work(folder, ops))
            mine = folder / f"{time.time_ns():020d}-{os.getpid()}.json"
            fd = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps({"plan": str(plan)}).encode())
        finally:
            os.close(gate)
    try:
        yield others
    finally:
        os.close(fd)
        with storage(mine, "remove"):
            ops.unlink(mine)


def is_another_at_work(store: Path) -> bool:
    """Whether a run that shares the store has announced its plan, and works on it. Changes nothing."""
    return any(OtherRun(path, plan=path).at_work for path in (store / _FOLDER).glob("*.json"))


def _at_work(folder: Path, ops: FileOps) -> Iterator[OtherRun]:
    """Yield the runs that are at work; files left by killed runs are removed."""
    for path in sorted(folder.glob("*.json")):
        other = OtherRun(path, Path(read_strings(path).get("plan", "")))
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
            same = _in_both(plan, other.plan, spill)
            least = max(_rows(plan), _rows(other.plan)) / 2
        except (StorageError, OSError):
            if other.at_work and other.plan.exists():
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


def _in_both(plan: Path, other: Path, spill: Path) -> int:
    with connection(spill) as database:
        query = f"SELECT count(*) FROM {parquet([plan])} a SEMI JOIN {parquet([other])} b ON a.key = b.key"
        return int(database.execute(query).fetchall()[0][0])
