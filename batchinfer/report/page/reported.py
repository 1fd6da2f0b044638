"""The run that a page shows: its row, and a database with its report tables."""

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
    """The run that a page shows."""

    database: Any  # has the tables of `batchinfer query`, with all runs of the job
    row: RunRow
    results: bool  # whether the table `results` exists and was published by this run
    notice: str = ""  # shown at the top of the page

    @property
    def has_output(self) -> bool:
        """Return True if answers consist of tokens; other tasks have no sections about output tokens."""
        return self.row["task"] not in WITHOUT_OUTPUT

    @property
    def shares_prefixes(self) -> bool:
        """Return True if prompts could share prefixes. If not, tables of newer versions have null for saved tokens."""
        return self.row["task"] is None or self.row["prefix_saved_tokens"] is not None

    def fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        found: list[tuple[Any, ...]] = self.database.execute(sql, list(parameters)).fetchall()
        return found

    def own(self, table: str) -> str:
        """Return the SQL of a subquery with this run's rows of a table."""
        return f'(SELECT * FROM "{table}" WHERE run_id = {_literal(self.row["run_id"])})'

    def has(self, table: str) -> bool:
        """Return True if the table has rows of this run."""
        return bool(self.fetch(f"SELECT 1 FROM {self.own(table)} LIMIT 1"))

    def why_empty(self, table: str) -> str:
        """Return a sentence that explains why the table has no rows of this run."""
        return (
            f"Nothing to show: this run has no table `{table}`. It is kept for the newest runs only, and "
            "an older version may not have written it."
        )


def find_run(database: Any, run_id: str | None, ending: str) -> RunRow | None:
    """Return the row of a run, or None if there is no such run.

    Args:
        database: A database with the report tables.
        run_id: The id of the run, or None for the newest run of an output.
        ending: The end of the path of that output.
    """
    where, wanted = ("run_id = ?", run_id) if run_id is not None else ("ends_with(output, ?)", ending)
    found = database.sql(f'SELECT * FROM "{RUN}" WHERE {where} ORDER BY run_id DESC LIMIT 1', params=[wanted])
    rows: list[RunRow] = found.to_arrow_table().to_pylist()
    if not rows:
        return None
    maps = [field.name for field in SCHEMAS[RUN] if pa.types.is_map(field.type)]
    return rows[0] | {name: dict(rows[0][name]) for name in maps if rows[0][name] is not None}


def is_in_place(database: Any, row: RunRow, ending: str) -> bool:
    """Return True if this run is the last one that published the result whose path has this ending."""
    published = database.execute(
        f'SELECT run_id, exit_status FROM "{RUN}" WHERE ends_with(output, ?) ORDER BY run_id DESC', [ending]
    ).fetchall()
    newest = next((run_id for run_id, status in published if is_published(status)), None)
    return bool(newest == row["run_id"])


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
