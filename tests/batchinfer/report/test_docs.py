"""docs/report.md shows the schema, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from batchinfer.report.tables.columns.declared import COLUMNS, TABLE_FORMAT, markdown
from batchinfer.report.tables.folder import KEPT_DETAILS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


def test_every_column_is_documented() -> None:
    for table, columns in COLUMNS.items():
        section = re.split(rf"^## {table}$", DOCUMENT, flags=re.MULTILINE)[1]
        assert section.split("\n## ")[0].strip() == markdown(columns)
        assert len({column.name for column in columns}) == len(columns)
        assert all(column.meaning for column in columns)


def test_the_constants_in_the_text_are_those_of_the_code() -> None:
    assert f"newest {KEPT_DETAILS} runs" in " ".join(DOCUMENT.split())
    assert f"`batchinfer.format`, now {TABLE_FORMAT}" in DOCUMENT
