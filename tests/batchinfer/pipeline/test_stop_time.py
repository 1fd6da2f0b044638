"""`--stop-at`: a run stops at a given time during any activity, and is continued later."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchinfer
from batchinfer.core.errors import StopTimeReached, UsageError
from batchinfer.job import load_job
from batchinfer.job.deadline import StopTime
from batchinfer.pipeline import options as run_options
from batchinfer.pipeline.plans import waves
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers import interrupts as waits
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Phase, Progress
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from batchinfer.verbs.status import status_of
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, table, write_job
from tests.batchinfer.wrong_jobs import Place
from tests.memory_transport import FakeTransport
from tests.patience import wait_until

AT = datetime(2026, 6, 1, 6, tzinfo=UTC)
STOPS = replace(FAKE, stop_at=StopTime("06:00", AT), transport=FakeTransport())
ROWS = 40


class Watched(Progress):
    """A run's progress. The stop time comes with an event: a phase, or a number of answers."""

    def __init__(self, event: str) -> None:
        super().__init__(None, quiet=True)
        self._event, self._now, self._answers = event, AT - timedelta(hours=7), 0
        self.interrupts = Interrupts(clock=lambda: self._now)
        self.notices: list[str] = []
        self.handled = True  # whether the run handles signals, as it does in the main thread

    def _happened(self, event: str) -> None:
        if event == self._event:
            self._now = AT
            wait_until(lambda: self.interrupts.pending is not None or event == "publishing")
            if event == "publishing":
                time.sleep(0.05)  # longer than the watch takes to see that it is time

    def phase(self, name: Phase, *total: Any) -> None:
        super().phase(name, *total)
        self._happened(name)

    def tick(self) -> None:
        super().tick()
        if self._work is not None and self._work.phase == "loading model":
            self._happened("waiting for an engine")

    def finished(self, **what: Any) -> None:
        super().finished(**what)
        self._answers += 1
        self._happened(f"{self._answers} answers")

    def run(self, path: Path, wanted: run_options.RunOptions = STOPS) -> Outcome:
        def ran() -> Outcome:
            return run_job(load_job(path), wanted, self, self.interrupts, self.notices.append)

        if not self.handled:
            return ran()
        with self.interrupts.installed():
            return ran()


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of keys that engines computed."""
    monkeypatch.setattr(waits, "LOOK_S", 0.01)
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "5")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def stopped(path: Path, watched: Watched, wanted: run_options.RunOptions = STOPS) -> str:
    with pytest.raises(StopTimeReached) as caught:
        watched.run(path, wanted)
    assert caught.value.exit_code == 75
    return str(caught.value)


def last_row(path: Path) -> dict[str, Any]:
    newest = sorted((path.parent / "out/res-report").glob("run-*.parquet"))[-1]
    return dict(pq.read_table(newest).to_pylist()[0])


def test_a_stopped_run_is_continued_by_the_same_command(tmp_path: Path, model: Path, log: Path) -> None:
    path, watched = write_job(tmp_path, model, people(ROWS)), Watched("12 answers")
    told = stopped(path, watched)
    # the rows of the step that was under way are finished: 15 answers
    assert "25 of 40 rows are left" in told
    assert "15 answers are stored" in told
    assert told.endswith(f"To continue: batchinfer run {path} --stop-at 06:00")
    assert any("the run stops at 2026-06-01" in line for line in watched.notices)
    assert any("rows being computed have up to 15 s" in line for line in watched.notices)
    row = last_row(path)
    assert (row["exit_code"], row["exit_status"]) == (75, "stopped")
    last = json.loads((tmp_path / "out/res-report/last_run.json").read_text())
    assert (last["exit_status"], last["message"]) == ("stopped", told)
    assert status_of(tmp_path / "out/res").state == "stopped"
    again = Watched("never")
    outcome = again.run(path)
    assert (outcome.exit_code, outcome.row["reused_requests"]) == (0, 15)
    assert len(log.read_text().split()) == len(set(log.read_text().split())) == ROWS
    assert [row["status"] for row in table(path)] == ["ok"] * ROWS


@pytest.mark.parametrize("event", ["reading", "waiting for an engine"])
def test_a_stop_time_that_comes_before_the_engines_run(
    tmp_path: Path, model: Path, log: Path, event: str
) -> None:
    path = write_job(tmp_path, model, people(ROWS))
    told = stopped(path, Watched(event))
    assert (
        "40 rows are left" if event.startswith("waiting") else "rows that are left were not counted"
    ) in told
    assert last_row(path)["exit_status"] == "stopped"
    assert not log.exists() or not log.read_text()


@pytest.mark.parametrize("event", ["publishing", f"{ROWS - 1} answers"])
def test_a_run_whose_rows_all_have_answers_is_published(tmp_path: Path, model: Path, event: str) -> None:
    """The engine's last step runs at the stop time, and answers all remaining rows."""
    path = write_job(tmp_path, model, people(ROWS))
    assert Watched(event).run(path).row["exit_status"] == "published"


def test_a_run_that_handles_no_signals_stops_too(tmp_path: Path, model: Path) -> None:
    """As in a thread of a scheduler."""
    path = write_job(tmp_path, model, people(ROWS))
    for event, said in (("12 answers", "25 of 40 rows"), ("reading", "not counted")):
        watched = Watched(event)
        watched.handled = False
        assert said in stopped(path, watched)


def test_a_run_that_stops_while_it_reads_reports_the_rest(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Ingestion.steps

    def slow(self: Ingestion) -> Generator[IngestProgress, None, None]:
        self._options = replace(self._options, chunk=replace(self._options.chunk, lines=100))
        for at in steps(self):
            yield at
            time.sleep(0.02)

    monkeypatch.setattr(Ingestion, "steps", slow)
    monkeypatch.setattr(waves, "MOST_AGAIN", 1.0)
    path = write_job(tmp_path, model, people(2000))
    told = stopped(path, Watched("12 answers"), replace(STOPS, waves_from_s=0.0))
    assert re.search(r"at least [\d,]+ rows are left", told), told


def test_the_library_takes_a_stop_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"stop_at.*'6 Uhr'.*06:00"):
        batchinfer.run(place.folder / "job.yaml", stop_at="6 Uhr")
    with pytest.raises(UsageError, match=r"2026-01-01T06:00 was .* ago; give a time in the future"):
        batchinfer.run(place.folder / "job.yaml", stop_at="2026-01-01T06:00")
    assert not place.results.exists()
