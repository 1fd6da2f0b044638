"""Tests that an input with too few rows is rejected, and the published result and stored answers stay."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import JobFileError, TooFewRows
from batchinfer.job import load_job
from batchinfer.plan.forecast.job import forecast_job
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, run, write_job
from tests.batchinfer.test_kept_nights import published

SETS = tuple[tuple[str, str], ...]
JOB: dict[str, Any] = {"on_error": {"max_error_rate": 1.0}, "output": {"path": "out/res"}}


def planned(path: Path, sets: SETS, sample: int | None = None) -> None:
    forecast_job(load_job(path, sets), lambda _: None, lambda _: None, sample=sample)


def refused(path: Path, words: str, *sets: tuple[str, str]) -> None:
    """Check that `run` and `plan` reject the input with these words, and the result stays."""
    before = published(path.parent)
    for attempt in (lambda: run(path, NO_ENGINE, *sets), lambda: planned(path, sets)):
        with pytest.raises(TooFewRows, match=words) as caught:
            attempt()
        assert caught.value.exit_code == 66
        assert str(caught.value).startswith(f"{path}: {'--set' if sets else 'line 1:'} input.")
    assert published(path.parent) == before


@pytest.mark.parametrize(("path", "sets"), [
    ("a.csv", ()),
    (["b.jsonl", "c.jsonl.gz"], ()),
    pytest.param(None, (("input.path", "null"), ("input.sql", "FROM 'a.csv' SELECT id AS text")), id="sql"),
])  # fmt: skip
def test_an_input_without_rows_is_refused(tmp_path: Path, model: Path, path: Any, sets: SETS) -> None:
    (tmp_path / "a.csv").write_text("id,text\n")
    (tmp_path / "b.jsonl").write_text("\n\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "out/res").mkdir(parents=True)
    job = write_job(tmp_path, model, **JOB | {"input": {"path": path or "a.csv"}})
    refused(job, "the input has no rows; set input.allow_empty: true to publish an empty result", *sets)


def test_a_file_without_rows_next_to_other_files_is_no_empty_input(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_text("{not json\n")
    job = write_job(tmp_path, model, **JOB | {"input": {"path": "*.jsonl"}})
    assert run(job, NO_ENGINE).row["rows_error"] == 1


@pytest.mark.parametrize("sections", [
    pytest.param({}, id="one answer"),
    pytest.param({"sampling": {"n": 3, "temperature": 0.8}}, id="three answers", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_input_with_too_few_rows_is_refused(tmp_path: Path, model: Path, sections: dict[str, Any]) -> None:
    rows: list[Any] = people(20)
    path = write_job(tmp_path, model, rows, **JOB | sections)
    assert run(path, FAKE, ("input.min_rows", "0.9")).exit_code == 0, "there is no result to compare with"
    refused(path, "has 20 rows, and the job needs at least 21;", ("input.min_rows", "21"))
    write_job(tmp_path, model, [*rows[:16], "{not json"], **JOB | sections)
    share = r"has 17 rows, and the job needs at least 18 \(0.9 of the 20 rows of the result in .*/out/res\)"
    refused(path, share, ("input.min_rows", "0.9"))
    write_job(tmp_path, model, [*rows[:17], "{not json"], **JOB | sections)
    planned(path, (("input.min_rows", "0.9"),))
    assert run(path, NO_ENGINE, ("input.min_rows", "0.9")).row["reused_requests"] > 0


@pytest.mark.slow
def test_a_trial_and_a_sampled_plan_may_read_few_rows(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(40), **JOB | {"input": {"path": "in.jsonl", "min_rows": 40}})
    assert run(path, replace(FAKE, limit=3)).row["rows"] == 3
    planned(path, (), sample=20)


@pytest.mark.parametrize(("section", "words"), [
    ({"min_rows": 0}, "found the number 0; it must be a number of rows from 1, such as 1000, or a share"),
    ({"min_rows": 1.5}, "found the number 1.5; it must be"),
    ({"min_rows": True}, "found true; it must be"),
    ({"min_rows": 11, "limit": 10}, "11 rows are more than input.limit, 10, lets the job read"),
    ({"limit": 0}, "input.limit: found the number 0; it must be a whole number"),
])  # fmt: skip
def test_wrong_guards_are_mistakes(tmp_path: Path, model: Path, section: dict[str, Any], words: str) -> None:
    path = write_job(tmp_path, model, people(1), **JOB | {"input": {"path": "in.jsonl"} | section})
    with pytest.raises(JobFileError, match=words):
        load_job(path)
