"""docs/cookbook.md: every query is answered over a real result, and says what the text above it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchinfer.query import opened_result
from tests.batchinfer.wrong_jobs import Place

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
FEWEST = 12
# What a run without any of it has no row for
MAY_BE_EMPTY = (
    "status = 'error'",
    "finish_reason = 'length'",
    "preemptions > 0",
    "exit_code <> 0",
    "error_codes",
)


def answer(measured: Place, sql: str) -> list[dict[str, Any]]:
    with opened_result(measured.results, False) as result, result.answer(sql) as found:
        rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows


@pytest.mark.parametrize("sql", QUERIES, ids=range(len(QUERIES)))
def test_every_query_is_answered(sql: str, measured: Place) -> None:
    rows = answer(measured, sql)
    assert rows or any(words in sql for words in MAY_BE_EMPTY)


def test_there_are_enough() -> None:
    assert len(QUERIES) >= FEWEST


@pytest.mark.parametrize("words", ["wall_load_s", "'^device_.*_s$'"])
def test_the_parts_of_time_are_all_of_it(words: str, measured: Place) -> None:
    (sql,) = (one for one in QUERIES if words in one)
    rows, whole = answer(measured, sql), "wall_s" if "wall" in words else "wall_device_s"
    (run,) = answer(measured, "FROM run")
    assert sum(row["seconds"] for row in rows) == pytest.approx(run[whole], rel=0.01)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_the_shared_beginning_paid_most(measured: Place) -> None:
    (sql,) = (one for one in QUERIES if "device_s_saved" in one)
    best = answer(measured, sql)[0]
    assert best["device_s_saved"] > 0
    (sql,) = (one for one in QUERIES if "first_row" in one)
    assert all(row["first_row"] is not None for row in answer(measured, sql))
