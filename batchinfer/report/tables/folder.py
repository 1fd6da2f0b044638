"""Where the report tables lie, how they are named, and how long they are kept."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from batchinfer.core.errors import OutputConflict
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.spool import TEMPORARY

# Other tables can have millions of rows a run: those of the newest runs are kept. Run rows are one row
# each and are kept for ever, so that a year of nightly runs can be compared.
KEPT_DETAILS = 10
LAST_RUN = "last_run.json"  # how the newest run ended, for monitors
_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6,7}")


def report_folder(root: Path) -> Path:
    """Return `/d/res-report` for `/d/res`: next to the root of a job's results, never inside."""
    return root.with_name(f"{root.name}-report")


def check_report_folder(folder: Path) -> None:
    """Raises OutputConflict if a run cannot keep its tables there: it is a link, or no folder."""
    if folder.is_symlink():
        raise OutputConflict(
            f"{folder}: is a symbolic link, and the report is written there; remove the link, or put the folder that "
            f"it leads to ({os.path.realpath(folder)}) in its place"
        )
    if folder.exists() and not folder.is_dir():
        raise OutputConflict(f"{folder}: is a file in the place of the report's folder; move it away")


def new_run_id(now: datetime | None = None) -> str:
    """A fresh run id, e.g. `20261120T223000Z-1f0c9a7`: ids sort by the time at which runs started."""
    now = now or datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond:05x}{os.urandom(1).hex()}"


def table_path(folder: Path, table: str, run_id: str) -> Path:
    """`table` is one of `SCHEMAS`."""
    return folder / f"{table}-{run_id}.parquet"


def tables(folder: Path, table: str, suffix: str = "") -> list[Path]:
    """The files of one table, oldest run first. Only those named by a run: others in the folder are not ours."""
    found = folder.glob(f"{table}-*.parquet{suffix}")
    return sorted(path for path in found if _RUN_ID.fullmatch(path.name.split("-", 1)[1].split(".")[0]))


def prune(folder: Path, kept: int = KEPT_DETAILS) -> list[Path]:
    """Delete the tables of all but the newest `kept` runs; returns what went. Never a run row."""
    gone: list[Path] = []
    for table in SCHEMAS.keys() - {RUN}:
        newest_first = sorted(tables(folder, table), reverse=True)
        gone += newest_first[kept:]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


@contextmanager
def writing(folder: Path, lock: Path) -> Iterator[None]:
    """Hold `lock` as one of the runs that write tables into `folder`.

    Whoever finds nobody else there deletes what killed runs left half written.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _is_alone(fd):
            sweep(folder)
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _is_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> list[Path]:
    """Delete what a killed run left half written; only while nobody else writes. Returns what went."""
    gone = [path for table in SCHEMAS for path in tables(folder, table, TEMPORARY)]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone
