"""Deadlines: their time, the forecast that they are met, and the rows finished by then."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.job.deadline import next_moment
from batchinfer.plan.forecast.deadline import FIRST_LOOK_S, Deadline, DeadlineWatch, StopForecast
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.plan.forecast.text import forecast_json, forecast_lines
from batchinfer.plan.order.plan import Plan
from batchinfer.report.summary import summary
from tests.batchinfer.pipeline.test_pipeline import people, run, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, runs_on, text

NOON = datetime(2026, 6, 1, 12, 0, 30).astimezone()


@pytest.mark.parametrize(("text", "at"), [
    ("12:01", datetime(2026, 6, 1, 12, 1)),
    ("12:00", datetime(2026, 6, 2, 12, 0)),
    ("06:00", datetime(2026, 6, 2, 6, 0)),
    ("2026-05-01T06:00", datetime(2026, 5, 1, 6, 0)),
    ("2026-07-01 06:00:30", datetime(2026, 7, 1, 6, 0, 30)),
])  # fmt: skip
def test_a_time_of_day_is_the_next_one_and_local(text: str, at: datetime) -> None:
    assert next_moment(text, NOON) == at.astimezone()


def test_a_zone_of_its_own_counts() -> None:
    at = next_moment("2026-06-02T06:00+05:30", NOON)
    assert at == datetime(2026, 6, 2, 0, 30, tzinfo=UTC)
    somewhere = NOON.astimezone(ZoneInfo("Pacific/Auckland"))
    assert next_moment("06:00", somewhere) == next_moment("06:00", NOON)


@pytest.mark.parametrize(
    "text", ["24:00", "6:00", "noon", "2026-06-02", "2026-13-01T06:00", "0001-01-01T00:00+14:00"]
)
def test_what_is_no_time_is_a_mistake(text: str, tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(3), deadline=text)
    with pytest.raises(JobFileError, match=r"deadline: found the text .* such as 06:00") as caught:
        load_job(path)
    assert len(caught.value.mistakes) == 1


@pytest.mark.parametrize(("engine_s", "done", "said"), [
    # 10 of 110 s pass before the engines start; of 10 rows, 2 are error rows, 3 have stored answers, 5 run
    (100.0, 10, "all rows will be done, 1 s before"),
    (200.0, 7, r"70% of the rows \(7 of 10\) will be done by then, and about 2 min are left"),
    (1e6, 5, r"50% of the rows \(5 of 10\)"),
    (None, None, "not known without a forecast"),
])  # fmt: skip
def test_share_of_a_stopped_run(tmp_path: Path, engine_s: float | None, done: int | None, said: str) -> None:
    tokens = {"token_count": [90, 40, 30, 20], "expected_tokens": [10, 10, 0, 0]}
    schema = pa.schema([(name, pa.int32()) for name in (*tokens, "users")])
    pq.write_table(pa.table({**tokens, "users": [2, 1, 1, 1]}, schema), tmp_path / "plan.parquet")
    plan = Plan(tmp_path / "plan.parquet", tmp_path, 10, 2, 7, 1, 3, 4, 180, 20, 0, 5, 100)
    found = StopForecast.of(NOON + timedelta(seconds=110), NOON, plan, 10.0, engine_s, upper_bound=False)
    assert found.rows_done == done
    assert found.share == (None if done is None else done / 10)
    assert re.search(said, found.text), found.text
    assert found.scaled(1000).rows_done == (None if done is None else done * 100)


def test_plan_has_the_forecast_of_a_run_that_stops(tmp_path: Path, model: Path, known_peaks: object) -> None:
    job = load_job(write_job(tmp_path, model, people(3)))
    at = datetime.now().astimezone() + timedelta(hours=1)
    found = forecast_job(job, lambda _: None, lambda _: None, stop_at=at)
    told = {"at": at.isoformat(), "share": 1.0, "rows_done": 3, "left_s": 0.0}
    assert forecast_json(found, None)["stop"] == told
    assert any(line.startswith("  stop ") for line in forecast_lines(found, None))


@dataclass
class Clock:
    at: datetime = NOON

    def __call__(self) -> datetime:
        return self.at

    def go(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def watch(clock: Clock, said: list[str], left_s: float, engine_s: float | None) -> DeadlineWatch:
    return DeadlineWatch(Deadline(NOON + timedelta(seconds=left_s), left_s, engine_s), said.append, clock)


def test_a_missed_deadline_is_reported_once() -> None:
    clock, said = Clock(), list[str]()
    found = watch(clock, said, 1000.0, 800.0)
    found.warn_if_late(5000.0)
    assert not said, "the first steps say little"
    clock.go(FIRST_LOOK_S)
    for left_s in (900.0, None):
        found.warn_if_late(left_s)
    assert not said
    found.warn_if_late(1570.0)
    found.warn_if_late(2000.0)
    (line,) = said
    assert line.startswith(
        "the deadline (2026-06-01 12:17) will be missed by about 10 min at the present rate; "
    )


def test_a_deadline_that_the_forecast_missed_is_not_reported_again() -> None:
    clock, said = Clock(), list[str]()
    found = watch(clock, said, 100.0, 800.0)
    clock.go(200)
    found.warn_if_late(600.0)
    assert not said


def test_a_deadline_says_that_a_calibration_is_not_counted() -> None:
    unknown = Deadline(NOON, 9.0, 5.0, uncounted=True)
    assert unknown.text.endswith("how long the calibration before it takes is not known, and not counted")
    assert "calibration" not in Deadline(NOON, 9.0, 5.0).text


def test_only_a_run_reports_a_missed_deadline_if_the_forecast_is_an_upper_bound() -> None:
    """Answers may be shorter than forecast."""
    clock, said = Clock(), list[str]()
    deadline = Deadline(NOON + timedelta(seconds=100), 100.0, 800.0, upper_bound=True)
    assert "12 min after it if every answer has max_tokens tokens" in deadline.text
    found = DeadlineWatch(deadline, said.append, clock)
    clock.go(FIRST_LOOK_S)
    found.warn_if_late(50.0)
    assert not said
    found.warn_if_late(80.0)
    assert len(said) == 1


def test_answers_count_until_then() -> None:
    clock, said = Clock(), list[str]()
    found = watch(clock, said, 100.0, None)
    found.answered(2, 30)
    clock.go(100)
    found.answered(1, 5)
    clock.go(0.1)
    found.answered(1, 7)
    assert (found.rows, found.output_tokens) == (3, 35)
    found.warn_if_late(None)
    assert len(said) == 1, "past it, whatever the rate"


def moment(seconds: float) -> str:
    return (datetime.now().astimezone() + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def test_plan_reports_if_the_deadline_will_be_met(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_on(monkeypatch, machine_of(1e6))
    for wanted, words in (
        (1e6, "forecast to finish at least"),
        (1.0, "has max_tokens tokens; the run makes a new forecast"),
    ):
        deadline = moment(wanted)
        found = planned(write_job(tmp_path, model, people(30), deadline=deadline))
        assert words in text(found)
        told: dict[str, Any] = forecast_json(found, None)["deadline"]
        assert told["at"] == deadline
        assert told["spare_s"] == pytest.approx(wanted - found.forecast.seconds, abs=60)


def test_a_run_reports_its_goodput(tmp_path: Path, model: Path) -> None:
    in_an_hour = moment(3570)  # nearly: spare time is rounded, and a quick run would print an hour
    path = write_job(tmp_path, model, [*people(20), people(1)[0] | {"id": "again"}], deadline=in_an_hour)
    row = run(path).row
    assert (row["deadline_met"], row["deadline_rows"]) == (True, 21)
    assert row["deadline_output_tokens"] == row["output_tokens"]
    assert row["goodput_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["wall_s"])
    assert re.search(r"met with 59 min( \d+ s)? to spare", summary(row))
    late = run(write_job(tmp_path, model, people(25), deadline="2026-01-01T06:00")).row
    assert (late["deadline_met"], late["deadline_rows"], late["deadline_output_tokens"]) == (False, 0, 0)
    assert late["goodput_tokens_per_s"] is None, "nothing can be done in no time"
    assert "2026-01-01 06:00, missed by" in summary(late)


def test_in_an_hour_that_occurs_twice_the_future_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime.fromisoformat("2026-10-25T02:15:00+01:00")  # the second time
        assert next_moment("02:30", now) == datetime.fromisoformat("2026-10-25T02:30:00+01:00")
        before = datetime.fromisoformat("2026-10-25T02:15:00+02:00")
        assert next_moment("02:30", before) == datetime.fromisoformat("2026-10-25T02:30:00+02:00")
    finally:
        monkeypatch.undo()
        time.tzset()
