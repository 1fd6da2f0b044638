"""Every column of the report is documented, and docs/report.md agrees with constants of the code."""

from __future__ import annotations

from pathlib import Path

from batchinfer.report.tables.columns.declared import COLUMNS, TABLE_FORMAT
from batchinfer.report.tables.folder import KEPT_DETAILS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


def test_every_column_has_one_name_and_a_meaning() -> None:
    for columns in COLUMNS.values():
        assert len({column.name for column in columns}) == len(columns)
        assert all(column.meaning for column in columns)


def test_the_constants_in_the_text_are_those_of_the_code() -> None:
    assert f"newest {KEPT_DETAILS} runs" in " ".join(DOCUMENT.split())
    assert f"`batchinfer.format`, now {TABLE_FORMAT}" in DOCUMENT
