"""The run that a page is about: its row, and a database with the tables of its report."""

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
    """`database` has the report's tables as `batchinfer query` has them, those of other runs of the job included."""

    database: Any
    row: RunRow
    results: bool  # whether the table `results` is there and is what this run published
    notice: str = ""  # what a reader has to know before all else

    @property
    def has_output(self) -> bool:
        """Return True if answers are made of tokens. Sections about tokens of answers mean nothing for other tasks."""
        return self.row["task"] not in WITHOUT_OUTPUT

    @property
    def shares_prefixes(self) -> bool:
        """Return True if prompts could share prefixes: the newer tables leave the tokens null if not."""
        return self.row["task"] is None or self.row["prefix_saved_tokens"] is not None

    def fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        found: list[tuple[Any, ...]] = self.database.execute(sql, list(parameters)).fetchall()
        return found

    def own(self, table: str) -> str:
        """Return what SQL reads for this run's rows of a table."""
        return f'(SELECT * FROM "{table}" WHERE run_id = {_literal(self.row["run_id"])})'

    def has(self, table: str) -> bool:
        """Whether this run has left rows in that table."""
        return bool(self.fetch(f"SELECT 1 FROM {self.own(table)} LIMIT 1"))

    def lacks(self, table: str) -> str:
        """Why there are no rows in that table, as a sentence."""
        return (
            f"Nothing to show: the table `{table}` of this run is not there. It is kept for the newest runs only, and "
            "an older version may not have written it."
        )


def find_run(database: Any, run_id: str | None, ending: str) -> RunRow | None:
    """The row of the run with that id, else of the newest whose output ends so; None: there is none."""
    where, wanted = ("run_id = ?", run_id) if run_id is not None else ("ends_with(output, ?)", ending)
    found = database.sql(f'SELECT * FROM "{RUN}" WHERE {where} ORDER BY run_id DESC LIMIT 1', params=[wanted])
    rows: list[RunRow] = found.to_arrow_table().to_pylist()
    if not rows:
        return None
    maps = [field.name for field in SCHEMAS[RUN] if pa.types.is_map(field.type)]
    return rows[0] | {name: dict(rows[0][name]) for name in maps if rows[0][name] is not None}


def is_in_place(database: Any, row: RunRow, ending: str) -> bool:
    """Whether a published result whose path ends so is what this run published."""
    published = database.execute(
        f'SELECT run_id, exit_status FROM "{RUN}" WHERE ends_with(output, ?) ORDER BY run_id DESC', [ending]
    ).fetchall()
    newest = next((run_id for run_id, status in published if is_published(status)), None)
    return bool(newest == row["run_id"])


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
