"""Tests docs/cookbook.md: each query runs over a real result and returns the values in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer import run
from batchinfer.verbs.query import OpenResult, open_result
from tests.batchinfer.wrong_jobs import Place

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text("utf-8")
ALL_QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
# test_reasoning_job.py runs the queries about reasoning
QUERIES = [sql for sql in ALL_QUERIES if "reasoning" not in sql]
FEWEST = 12
# Queries without a row, as the run has no such data
MAY_BE_EMPTY = (
    "status = 'error'",
    "finish_reason = 'length'",
    "preemptions > 0",
    "exit_code <> 0",
    "error_codes",
)


@pytest.fixture(scope="module")
def opened(measured: Place) -> Iterator[OpenResult]:
    with open_result(measured.results, False) as result:
        yield result


def answer(opened: OpenResult, sql: str) -> list[dict[str, Any]]:
    with opened.answer(sql) as found:
        rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows


@pytest.mark.parametrize("sql", QUERIES, ids=range(len(QUERIES)))
def test_every_query_is_answered(sql: str, opened: OpenResult) -> None:
    rows = answer(opened, sql)
    assert rows or any(words in sql for words in MAY_BE_EMPTY)


def test_there_are_enough() -> None:
    assert len(QUERIES) >= FEWEST


@pytest.mark.parametrize("words", ["wall_load_s", "'^device_.*_s$'"])
def test_the_parts_of_time_add_up(words: str, opened: OpenResult) -> None:
    (sql,) = (one for one in QUERIES if words in one)
    rows, whole = answer(opened, sql), "wall_s" if "wall" in words else "wall_device_s"
    (run,) = answer(opened, "FROM run")
    assert sum(row["seconds"] for row in rows) == pytest.approx(run[whole], rel=0.01)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_a_shared_prefix_saved_time(opened: OpenResult) -> None:
    (sql,) = (one for one in QUERIES if "device_s_saved" in one)
    best = answer(opened, sql)[0]
    assert best["device_s_saved"] > 0
    (sql,) = (one for one in QUERIES if "first_row" in one)
    assert all(row["first_row"] is not None for row in answer(opened, sql))


@pytest.mark.slow
def test_the_job_of_the_page_gives_several_answers_per_row(tmp_path: Path, model: Path) -> None:
    """The page's job: each repetition is a separate request with its own draws, and the prompt runs once."""
    questions = "".join(json.dumps({"question_id": i, "question": f"Why {i}?"}) + "\n" for i in range(3))
    (tmp_path / "questions.jsonl").write_text(questions)
    (job_file := tmp_path / "job.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    settings = {"model.path": model, "sampling.max_tokens": 12, "engine.device": "cpu"}
    result = run(job_file, {**settings, "output.path": "out"})
    assert (result.rows_ok, result.computed) == (12, 12)
    assert result.row["prefix_saved_tokens"] > 0
    (sql,) = re.findall(r"`(SELECT question_id, list[^`]+)`", " ".join(PAGE.split()))
    with open_result(result.results, False) as several, several.answer(sql) as found:
        rows = found.to_arrow_table().to_pylist()
    assert sorted(row["question_id"] for row in rows) == [0, 1, 2]
    assert all(len(set(row["answers"])) == len(row["answers"]) == 4 for row in rows)
    fewer = run(job_file, {**settings, "output.path": "out", "input.limit": 2})
    assert fewer.to_arrow().to_pylist() == result.to_arrow().slice(0, 2).to_pylist()
