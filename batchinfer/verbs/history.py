"""Implements `batchinfer history`: the runs of a job, from the run tables in its report folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.core.errors import InputMissing, StorageError, UsageError
from batchinfer.filesystem.duck import parquet
from batchinfer.job import Job
from batchinfer.report.history import (
    Comparison,
    PastRun,
    compare,
    comparison_lines,
    history_lines,
    history_sql,
    trends,
)
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.folder import report_folder, tables
from batchinfer.store.results.find_state import find_state

SLOWER = 65  # exit code if the newest run is slower than --fail-if-slower allows


@dataclass(frozen=True, slots=True)
class History:
    """All runs of a job that wrote a report.

    Attributes:
        report: The report folder of the job.
        runs: The runs, oldest first.
    """

    report: Path
    runs: tuple[PastRun, ...]

    @property
    def comparison(self) -> Comparison:
        """Compare the newest run with the earlier runs."""
        return compare(self.runs)

    def lines(self, limit: int) -> list[str]:
        """Return lines for users: a table of the newest `limit` runs, and the comparison of the newest run."""
        older = len(self.runs) - limit
        more = [f"{older} older runs are not shown; --limit {len(self.runs)} shows all"] if older > 0 else []
        return [*history_lines(trends(self.runs, limit)), *more, *comparison_lines(self.comparison)]

    def to_json(self, limit: int) -> dict[str, Any]:
        """Return the folder of the report, the newest `limit` runs, and the speed of the newest run as a JSON object.

        The speed is compared with the median of earlier comparable runs, whatever `limit` is.
        """
        runs = [asdict(run) | {"change": change} for run, change in trends(self.runs, limit)]
        found = self.comparison
        return {
            "report": str(self.report),
            "runs": runs,
            "comparison": asdict(found) | {"change": found.change},
        }


def history_of(target: Path | Job) -> History:
    """Read the runs of a job from its report folder.

    Args:
        target: The job, or its result folder or report folder.

    Raises:
        InputMissing: No run has written a report.
        StorageError: A report table is damaged.
    """
    folder = report_folder(target.results_root) if isinstance(target, Job) else _report_of(target)
    files = tables(folder, RUN)
    if not files:
        raise InputMissing(
            f"{folder}: no run of this job has left a table there yet; `batchinfer run` writes one for each run"
        )
    return History(folder, _read(folder, files))


def _report_of(folder: Path) -> Path:
    return folder if tables(folder, RUN) else report_folder(find_state(folder).root)


def _read(folder: Path, files: list[Path]) -> tuple[PastRun, ...]:
    with duckdb.connect(config={"python_enable_replacements": False}) as database:
        try:
            add_report_view(database, RUN, files)
            rows = database.sql(history_sql(RUN)).to_arrow_table().to_pylist()
        except duckdb.Error as error:
            raise StorageError(
                f"{folder}: {error}; move a damaged table away, and the other runs are shown"
            ) from error
    return tuple(PastRun(**{**row, "started_at": _utc(row["started_at"])}) for row in rows)


def _utc(time: datetime | None) -> datetime | None:
    return None if time is None else time.astimezone(UTC)


def share_of(text: str) -> float:
    """Parse a percentage such as `10%`, and return it as a share: 0.1. Raises UsageError unless 0% < value < 100%."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None or not 0 < float(found[1]) < 100:
        raise UsageError(f"--fail-if-slower {text}: wanted a percentage above 0% and below 100%, e.g. 10%")
    return float(found[1]) / 100


def add_report_view(
    database: duckdb.DuckDBPyConnection, table: str, files: Sequence[Path], where: str = ""
) -> None:
    """Create a view of one report table over all runs of a job.

    Args:
        database: The database.
        table: The name of the table, such as "run". The view has the same name.
        files: The files of the table, one per run. A column that a file lacks is null in its rows.
        where: An SQL clause that limits the rows, such as " WHERE …", or "".
    """
    known = f"known_{table}"
    database.register(known, SCHEMAS[table].empty_table())
    rows = parquet(files, ", union_by_name = true")
    database.execute(f'CREATE VIEW "{table}" AS FROM {known} UNION ALL BY NAME FROM {rows}{where}')
