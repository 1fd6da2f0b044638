"""The folder of report tables: its path, the names of files, and which files are kept."""

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

# Tables of this many runs are kept, because they may have millions of rows. The run table has one row per run and is
# kept forever.
KEPT_DETAILS = 10
LAST_RUN = "last_run.json"  # the outcome of the newest run, for monitoring
_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6,7}")


def report_folder(root: Path) -> Path:
    """Return the report folder next to the root folder of results: `/d/res-report` for `/d/res`."""
    return root.with_name(f"{root.name}-report")


def check_report_folder(folder: Path) -> None:
    """Check that the report folder can be used.

    Raises:
        OutputConflict: It is a symbolic link or not a folder.
    """
    if folder.is_symlink():
        raise OutputConflict(
            f"{folder}: is a symbolic link, and the report is written there; remove the link, or put the folder that "
            f"it leads to ({os.path.realpath(folder)}) in its place"
        )
    if folder.exists() and not folder.is_dir():
        raise OutputConflict(
            f"{folder}: is a file, and the report needs a folder with this name; move the file away"
        )


def new_run_id(now: datetime | None = None) -> str:
    """Return a new run id such as `20261120T223000Z-1f0c9a7`. Ids sort by the start time of runs.

    Args:
        now: The start time. None: the current time.
    """
    now = now or datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond:05x}{os.urandom(1).hex()}"


def table_path(folder: Path, table: str, run_id: str) -> Path:
    """Return the path of a report table of a run.

    Args:
        folder: The folder of report tables.
        table: The name of the table, a key of `SCHEMAS`.
        run_id: The id of the run.
    """
    return folder / f"{table}-{run_id}.parquet"


def tables(folder: Path, table: str, suffix: str = "") -> list[Path]:
    """Return the files of a report table of all runs, oldest run first.

    Files without a run id in their names are ignored.

    Args:
        folder: The folder of report tables.
        table: The name of the table.
        suffix: A suffix that the file names have after `.parquet`, such as ".tmp" for incomplete files.
    """
    found = folder.glob(f"{table}-*.parquet{suffix}")
    return sorted(path for path in found if _RUN_ID.fullmatch(path.name.split("-", 1)[1].split(".")[0]))


def prune(folder: Path, kept: int = KEPT_DETAILS) -> list[Path]:
    """Delete report tables of old runs, and return the deleted files. Run tables are never deleted.

    Args:
        folder: The folder of report tables.
        kept: The number of newest runs whose tables are kept.
    """
    gone: list[Path] = []
    for table in SCHEMAS.keys() - {RUN}:
        newest_first = sorted(tables(folder, table), reverse=True)
        gone += newest_first[kept:]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


@contextmanager
def lock_for_writing(folder: Path, lock: Path) -> Iterator[None]:
    """Hold a shared lock while a run writes report tables.

    If no other run holds it, incomplete files of killed runs are deleted first.

    Args:
        folder: The folder of report tables.
        lock: The lock file.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _is_only_run(fd):
            sweep(folder)
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _is_only_run(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> list[Path]:
    """Delete incomplete report tables of killed runs, and return them.

    Call it only while no run writes tables.
    """
    gone = [path for table in SCHEMAS for path in tables(folder, table, TEMPORARY)]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone
