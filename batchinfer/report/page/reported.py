"""Finds the run that a report page shows: its row, and a database with its report tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.columns.of_tasks import WITHOUT_OUTPUT
from batchinfer.report.tables.exit_status import is_published
from batchinfer.report.tables.tables import RunRow


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The run that a report page shows.

    Attributes:
        database: A DuckDB connection with the tables of `batchinfer query`, for all runs of the job.
        row: The row of the run table.
        results: True if the database has a table `results`, which this run published.
        notice: Text that is shown at the top of the page.
    """

    database: Any
    row: RunRow
    results: bool
    notice: str = ""

    @property
    def has_output(self) -> bool:
        """Return True if the run's answers consist of tokens. Otherwise no section is about output tokens."""
        return self.row["task"] not in WITHOUT_OUTPUT

    @property
    def shares_prefixes(self) -> bool:
        """Return True if prompts of the run could share prefixes. Otherwise no section is about prefixes."""
        return self.row["task"] is None or self.row["prefix_saved_tokens"] is not None

    def fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a SQL query over the report tables, and return its rows."""
        found: list[tuple[Any, ...]] = self.database.execute(sql, list(parameters)).fetchall()
        return found

    def own(self, table: str) -> str:
        """Return a SQL subquery for the rows of this run in a report table."""
        return f'(SELECT * FROM "{table}" WHERE run_id = {_literal(self.row["run_id"])})'

    def has(self, table: str) -> bool:
        """Return True if the report table has rows of this run."""
        return bool(self.fetch(f"SELECT 1 FROM {self.own(table)} LIMIT 1"))

    def why_empty(self, table: str) -> str:
        """Return a sentence for users that explains why a report table has no rows of this run."""
        return (
            f"Nothing to show: this run has no table `{table}`. It is kept for the newest runs only, and "
            "an older version may not have written it."
        )


def find_run(database: Any, run_id: str | None, ending: str) -> RunRow | None:
    """Return the row of a run in the run table, or None if there is no such run.

    Args:
        database: A DuckDB connection with the report tables.
        run_id: The id of the run. None: the newest run with this output folder.
        ending: The last part of the path of the output folder. It is only used without `run_id`.
    """
    where, wanted = ("run_id = ?", run_id) if run_id is not None else ("ends_with(output, ?)", ending)
    found = database.sql(f'SELECT * FROM "{RUN}" WHERE {where} ORDER BY run_id DESC LIMIT 1', params=[wanted])
    rows: list[RunRow] = found.to_arrow_table().to_pylist()
    if not rows:
        return None
    maps = [field.name for field in SCHEMAS[RUN] if pa.types.is_map(field.type)]
    return rows[0] | {name: dict(rows[0][name]) for name in maps if rows[0][name] is not None}


def is_newest_published(database: Any, row: RunRow, ending: str) -> bool:
    """Return True if no later run has published a result to the folder of this run's result.

    Only the run table is read, not the files of the result.

    Args:
        database: A DuckDB connection with the report tables.
        row: The row of the run in the run table.
        ending: The last part of the path of the result folder.
    """
    published = database.execute(
        f'SELECT run_id, exit_status FROM "{RUN}" WHERE ends_with(output, ?) ORDER BY run_id DESC', [ending]
    ).fetchall()
    newest = next((run_id for run_id, status in published if is_published(status)), None)
    return bool(newest == row["run_id"])


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
