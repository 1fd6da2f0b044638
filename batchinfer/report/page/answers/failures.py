"""The section with error rows by code and some ids. It shows no prompts, answers or messages, which may be private."""

from __future__ import annotations

from typing import Any

from batchinfer.core.wording import count, percent
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection

EXAMPLES = 10  # ids per code
_MOST_CODES = 30
_ID_CHARACTERS = 60

_BY_CODE = f"""
SELECT error_code, count(*) AS rows, arg_min(coalesce(custom_id, 'row ' || row_id), row_id, {EXAMPLES}) AS examples
FROM results WHERE error_code IS NOT NULL GROUP BY error_code ORDER BY rows DESC, error_code
"""
_COLUMNS = (
    TableColumn("code", "error code"),
    TableColumn("rows", "rows", "rows"),
    TableColumn("share", "of all rows", "0…1"),
    TableColumn("examples", "ids of the first rows"),
)


def failures(run: ReportedRun) -> PageSection:
    """Return the section of the report page about error rows, drawn as a bar for each error code."""
    title, row = "Error rows", run.row
    if row["rows_error"] is None:
        return PageSection(
            "errors", title, "Nothing to show: this run ended before its error rows were counted."
        )
    if row["rows"] == 0:
        return PageSection("errors", title, "None: the input has no rows.")
    if not row["rows_error"]:
        return PageSection("errors", title, f"None: all {count(row['rows'])} rows have an answer.")
    rows = _published(run) if run.results else _counted(run)
    text = f"{count(row['rows_error'])} of {count(row['rows'])} rows ({percent(_of_all(run, row['rows_error']))})."
    more = (
        f" The {_MOST_CODES} most frequent of {len(rows)} codes are shown." if len(rows) > _MOST_CODES else ""
    )
    options = {"category": "code", "bars": ["rows"], "unit": "rows", "horizontal": True}
    chart = Chart("bars", "Bars of error rows by code", options)
    return PageSection(
        "errors", title, f"{text}{more}", chart, PageTable(_COLUMNS, rows[:_MOST_CODES]), _note(run.results)
    )


def _note(published: bool) -> str:
    if published:
        return "The results have each row's message in the column `error_message`; texts are not shown here."
    return "Which rows these are is not shown, because this run has published no results, or others are in place."


def _published(run: ReportedRun) -> list[tuple[Any, ...]]:
    return [
        (code, rows, _of_all(run, rows), ", ".join(_short(one) for one in examples))
        for code, rows, examples in run.fetch(_BY_CODE)
    ]


def _counted(run: ReportedRun) -> list[tuple[Any, ...]]:
    codes = sorted((run.row["error_codes"] or {}).items(), key=lambda item: (-item[1], item[0]))
    return [(code, rows, _of_all(run, rows), None) for code, rows in codes]


def _of_all(run: ReportedRun, rows: int) -> float | None:
    return rows / run.row["rows"] if run.row["rows"] else None


def _short(name: str) -> str:
    return name if len(name) <= _ID_CHARACTERS else f"{name[:_ID_CHARACTERS]}…"
