"""docs/report.md shows the schema, all of it and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from batchinfer.report.tables.columns import (
    BUCKET_COLUMNS,
    EXPERT_COLUMNS,
    PHASE_COLUMNS,
    PREFIX_COLUMNS,
    REQUEST_COLUMNS,
    ROW_COLUMNS,
    RUN_COLUMNS,
    STEP_COLUMNS,
    TABLE_FORMAT,
    Column,
    markdown,
)
from batchinfer.report.tables.folder import KEPT_DETAILS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        ("run", RUN_COLUMNS),
        ("steps", STEP_COLUMNS),
        ("requests", REQUEST_COLUMNS),
        ("phases", PHASE_COLUMNS),
        ("buckets", BUCKET_COLUMNS),
        ("prefixes", PREFIX_COLUMNS),
        ("rows", ROW_COLUMNS),
        ("experts", EXPERT_COLUMNS),
    ],
)
def test_every_column_is_documented(heading: str, columns: Sequence[Column]) -> None:
    section = re.split(rf"^## {heading}$", DOCUMENT, flags=re.MULTILINE)[1]
    assert section.split("\n## ")[0].strip() == markdown(columns)


def test_every_column_has_a_meaning_and_a_name_of_its_own() -> None:
    for columns in (
        RUN_COLUMNS, STEP_COLUMNS, REQUEST_COLUMNS, ROW_COLUMNS, EXPERT_COLUMNS, PHASE_COLUMNS, BUCKET_COLUMNS,
        PREFIX_COLUMNS,
    ):  # fmt: skip
        names = [column.name for column in columns]
        assert len(set(names)) == len(names)
        assert all(column.meaning for column in columns)


def test_the_constants_in_the_text_are_those_of_the_code() -> None:
    assert f"newest {KEPT_DETAILS} runs" in " ".join(DOCUMENT.split())
    assert f"`batchinfer.format`, now {TABLE_FORMAT}" in DOCUMENT
