"""docs/report.md shows the schema, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchinfer.report.tables.columns.declared import COLUMNS, TABLE_FORMAT, markdown
from batchinfer.report.tables.folder import KEPT_DETAILS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", COLUMNS)
def test_every_column_is_documented(table: str) -> None:
    section = re.split(rf"^## {table}$", DOCUMENT, flags=re.MULTILINE)[1]
    assert section.split("\n## ")[0].strip() == markdown(COLUMNS[table])
    names = [column.name for column in COLUMNS[table]]
    assert len(set(names)) == len(names)
    assert all(column.meaning for column in COLUMNS[table])


def test_the_constants_in_the_text_are_those_of_the_code() -> None:
    assert f"newest {KEPT_DETAILS} runs" in " ".join(DOCUMENT.split())
    assert f"`batchinfer.format`, now {TABLE_FORMAT}" in DOCUMENT
