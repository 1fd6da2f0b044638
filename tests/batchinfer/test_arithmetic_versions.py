"""Jobs after a new version of their arithmetic: they say which stored answers run again. The engine is fake."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.job import load_job
from batchinfer.pipeline.plans import earlier_drafts, waves
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.plan.forecast.earlier_answers import EarlierAnswers
from batchinfer.plan.forecast.run import add_earlier_answers
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.setup import numerics
from batchinfer.report.progress import Progress
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, quick_plan, runs_on, text
from tests.batchinfer.test_drafts_job import Seen

INT8 = {"quantization": "int8"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip slow parts of a forecast, on a machine whose peaks are known."""
    quick_plan(monkeypatch)
    machine = machine_of(1e10)
    runs_on(monkeypatch, replace(machine, peak_flops={**machine.peak_flops, "int8": 1e10}))
    set_version(monkeypatch, 1)


def set_version(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(numerics, "VERSIONS", {"int8": {"cpu": number, "cuda": 1}})


def lines(path: Path, options: Any = FAKE) -> list[str]:
    """Run a job and return its lines about stored answers that run again."""
    notices: list[str] = []
    run_job(load_job(path), options, Progress(io.StringIO(), quiet=True), Interrupts(), notices.append)
    return [line for line in notices if "again" in line]


def count(path: Path, sample: int | None = None) -> int:
    """Return the number of stored answers that run again, by `plan --json`. Its text says the same."""
    found = planned(path, sample=sample)
    told = forecast_json(found, None)["earlier_answers"]
    assert ("  again " in text(found)) == (told is not None)
    return 0 if told is None else int(told["answers"])


def test_plan_and_run_count_the_answers_of_an_earlier_version(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rows are new, two are duplicates, and a trial answers twelve first."""
    twins = [row | {"id": f"x{row['id']}"} for row in people(2)]
    sections: Any = {"model": INT8, "drafts": ["earlier"], "input": {"id": "id"}}
    path = write_job(tmp_path, model, people(30) + twins, **sections)
    assert lines(path) == []
    write_job(tmp_path, model, people(40) + twins, **sections)
    assert count(path) == 0, "new rows were never answered"
    set_version(monkeypatch, 2)
    before = planned(path)
    assert before.earlier is not None
    assert before.forecast is not None
    assert before.earlier.seconds == pytest.approx(before.forecast.seconds * 30 / 40)
    assert "30 stored answers were made by int8 version 1 and run again: about " in text(before)
    monkeypatch.setattr(earlier_drafts, "with_draft", seen := Seen())
    (line,) = lines(path, replace(FAKE, limit=12))
    assert line.startswith("12 stored answers were made by int8 version 1 and run again: about ")
    assert count(path) == 18
    (line,) = lines(path)
    assert line.startswith("18 stored answers ")
    assert [tokens is not None for tokens in seen.given].count(True) == 18, (
        "answers of the last result become drafts"
    )
    assert lines(path) == []
    assert count(path) == 0
    (tmp_path / "out/.batchinfer-res/published.json").unlink()
    assert lines(path) == []


def test_answers_of_several_versions_and_samples_of_a_row(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, engine = {"temperature": 1.0, "n": 2}, {"deterministic": True}
    sections = {"model": INT8, "sampling": sampling, "engine": engine}
    path = write_job(tmp_path, model, people(4), **sections)
    lines(path)
    set_version(monkeypatch, 2)
    write_job(tmp_path, model, people(8)[2:], **sections)
    assert lines(path)[0].startswith("4 stored answers were made by int8 version 1 and run again")
    set_version(monkeypatch, 3)
    write_job(tmp_path, model, people(9), **sections)
    found = planned(path).earlier
    assert found is not None
    assert (found.answers, found.made_by) == (16, "int8 version 1 or 2")
    assert count(path, sample=9) == 16
    write_job(tmp_path, model, people(9), sampling=sampling)
    assert count(path) == 0, "other arithmetic has no earlier version"


def test_rows_that_run_while_others_are_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line counts the rows that no engine has received when all rows are read."""
    steps, plans = Ingestion.steps, list[Plan]()

    def slow(self: Ingestion) -> Iterator[IngestProgress]:
        self._options = replace(self._options, chunk=replace(self._options.chunk, lines=20))
        for at in steps(self):
            yield at
            time.sleep(0.05)

    def seen(*found: Any) -> Any:
        plans.append(found[3])
        return add_earlier_answers(*found)

    path = write_job(tmp_path, model, people(100), model=INT8)
    lines(path)
    set_version(monkeypatch, 2)
    monkeypatch.setattr(Ingestion, "steps", slow)
    monkeypatch.setattr(waves, "MOST_AGAIN", 1.0)
    monkeypatch.setattr(waves, "add_earlier_answers", seen)
    said = lines(path, replace(FAKE, waves_from_s=0.0))
    (plan,) = plans
    assert [line.split(" stored")[0] for line in said] == [str(plan.to_run)] * bool(plan.to_run)


@pytest.mark.parametrize(
    ("answers", "seconds", "said"),
    [
        (1, None, "1 stored answer was made by int8 version 1 and runs again"),
        (70, 99.0, "70 stored answers were made by int8 version 1 and run again: about 2 min"),
        (
            1_200_000,
            18_060.0,
            "1,200,000 stored answers were made by int8 version 1 and run again: about 5 h 1 min; "
            "--stop-at spreads this over several nights",
        ),
    ],
)
def test_the_line_about_earlier_answers(answers: int, seconds: float | None, said: str) -> None:
    assert EarlierAnswers(answers, "int8 version 1", seconds).text == said
