"""The section with all columns of the table `run`, their values and their meanings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.core.text import without_markup
from batchinfer.report.page.page_table import Amount, PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import PageSection
from batchinfer.report.tables.columns.run import RUN_COLUMNS

_COLUMNS = (
    TableColumn("column", "column"),
    TableColumn("value", "value"),
    TableColumn("unit", "unit"),
    TableColumn("meaning", "meaning"),
)


def all_columns(run: ReportedRun) -> PageSection:
    """Return the section of the report page that lists all columns of the run table with their meanings."""
    rows = [
        (
            column.name,
            Amount(_value(run.row[column.name]), column.unit),
            column.unit,
            without_markup(column.meaning),
        )
        for column in RUN_COLUMNS
    ]
    text = "All columns of the table `run`. A dash means not known, or not applicable."
    return PageSection("all", "Everything about this run", text, None, PageTable(_COLUMNS, rows))


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return value
