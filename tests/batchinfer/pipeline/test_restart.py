"""A worker that dies is replaced: nothing is lost, nothing is computed twice, and a row that kills workers is found."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, Interrupted
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.workers.feed import run_plan
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.summary import PHASES
from tests.batchinfer.pipeline import test_pipeline as pipeline_kit
from tests.batchinfer.pipeline.test_pipeline import people, table, write_job
from tests.examples import first_of

ROWS, BATCH = 40, 5


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty rows with ids, five a step; deaths are counted, and so is what is computed."""
    monkeypatch.setenv("FAKE_ENGINE_BATCH", str(BATCH))
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.08")  # more than the time between two messages of progress
    monkeypatch.setenv("FAKE_ENGINE_STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    return write_job(tmp_path, model, people(ROWS), input={"path": "in.jsonl", "id": "id"})


class Ran:
    """A run with its notices."""

    def __init__(self, path: Path, interrupts: Interrupts | None = None) -> None:
        self.notices: list[str] = []
        self.path, self.interrupts = path, interrupts or Interrupts()

    def __call__(self) -> Any:
        return pipeline_kit.run_job(
            pipeline_kit.load_job(self.path), pipeline_kit.FAKE,
            pipeline_kit.Progress(pipeline_kit.io.StringIO(), quiet=True), self.interrupts, self.notices.append,
        )  # fmt: skip

    @property
    def row(self) -> dict[str, Any]:
        """Of the run table, which a run that failed has too."""
        newest = sorted((self.path.parent / "out/res-report").glob("run-*.parquet"))[-1]
        return dict(pq.read_table(newest).to_pylist()[0])

    @property
    def starts(self) -> int:
        return len((self.path.parent / "starts").read_bytes())

    @property
    def computed(self) -> Counter[str]:
        return Counter((self.path.parent / "log").read_text().split())


def dies(monkeypatch: pytest.MonkeyPatch, times: int, **how: object) -> None:
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", str(times))
    for name, value in how.items():
        monkeypatch.setenv(f"FAKE_ENGINE_{name}", str(value))


@pytest.mark.parametrize("how", first_of(("killed", "raises", "segfault", "exits"), 2))
def test_a_worker_that_dies_once_is_replaced(job: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    by: dict[str, dict[str, object]] = {
        "killed": {"DIES_BY": int(signal.SIGKILL)},
        "segfault": {"DIES_BY": int(signal.SIGSEGV)},
        "exits": {},
        "raises": {"RAISES": "RuntimeError"},
    }
    dies(monkeypatch, 1, DIES_AT_STEP=3, **by[how])
    ran = Ran(job)
    outcome = ran()
    assert outcome.exit_code == 0
    assert (ran.starts, outcome.row["worker_restarts"]) == (2, 1)
    assert len(table(job)) == ROWS
    assert set(ran.computed.values()) == {1}, "computed twice"
    assert len(ran.computed) == outcome.row["computed_requests"] == ROWS
    (told,) = (notice for notice in ran.notices if "starting a new one" in notice)
    words = {"killed": "memory", "segfault": "SIGSEGV", "exits": "exit status 3", "raises": "asked to raise"}
    assert words[how] in told
    assert "in.jsonl row " in told
    assert "(id p" in told
    assert told.count(" row ") == 8
    assert "and 17 more rows" in told  # 15 of 40 were answered
    spent = [outcome.row[f"{name}_s"] or 0.0 for name in PHASES]
    assert sum(spent) == pytest.approx(outcome.row["wall_s"], rel=0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be silent for one and a half seconds. The fake engine's model is forecast to be fast."""
    monkeypatch.setattr("batchinfer.pipeline.workers.replica.SILENT_S", 1.5)
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("step", first_of((3, 0), 1))
def test_an_engine_that_falls_silent_is_replaced_and_accuses_no_row(
    job: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Its rows run again as if nothing had been, with others."""
    dies(monkeypatch, 1, HANGS_AT_STEP=step)
    ran = Ran(job)
    outcome = ran()
    assert (outcome.exit_code, ran.starts, outcome.row["worker_restarts"]) == (0, 2, 1)
    assert {row["status"] for row in table(job)} == {"ok"}
    assert set(ran.computed.values()) == {1}
    (told,) = (notice for notice in ran.notices if "starting a new one" in notice)
    assert "the engine's process was ended, because it made no progress for 2 s" in told


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_says_it_may_take_long_is_waited_for(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It captures, or compiles."""
    dies(monkeypatch, 1, HANGS_AT_STEP=3, HANG_S=3, HANG_UNTIMED=1)
    ran = Ran(job)
    assert ran().exit_code == 0
    assert ran.starts == 1


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_row_that_hangs_engines_is_found(
    tmp_path: Path, model: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was in work for the second time when an engine fell silent, its group runs by itself."""
    monkeypatch.setattr("batchinfer.pipeline.workers.replica.SILENT_S", 0.8)
    monkeypatch.setenv("FAKE_ENGINE_HANGS_OF_MORE_TOKENS", "100")
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", "0")
    rows = people(ROWS)
    rows[7] |= {"text": "person " * 20}
    on_error = {"max_error_rate": 0.05}
    job = write_job(tmp_path, model, rows, input={"path": "in.jsonl", "id": "id"}, on_error=on_error)
    ran = Ran(job)
    assert ran().exit_code == 0
    assert {row["custom_id"]: row["error_code"] for row in table(job) if row["status"] != "ok"} == {
        "p7": "engine_died"
    }


def test_a_worker_that_is_killed_while_it_sends_is_replaced(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a message is received: its answers are lost with it, and are computed again."""
    dies(monkeypatch, 1, DIES_AT_STEP=3, DIES_SENDING=1)
    ran = Ran(job)
    outcome = ran()
    assert (outcome.exit_code, ran.starts, outcome.row["worker_restarts"]) == (0, 2, 1)
    assert len(table(job)) == ROWS
    assert len(ran.computed) == outcome.row["computed_requests"] == ROWS


@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, 71), (signal.SIGABRT, 69)])
def test_a_worker_that_always_dies_ends_the_job_and_its_rows_are_named(
    job: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals, code: int
) -> None:
    dies(monkeypatch, 99, DIES_AT_STEP=0, DIES_BY=int(by))
    ran = Ran(job)
    with pytest.raises(BatchInferError, match=r"it was computing only in\.jsonl row ") as caught:
        ran()
    assert caught.value.exit_code == code
    assert "it died 4 times in a row with little done in between" in str(caught.value)
    assert "same command resumes the job" in str(caught.value)
    assert (ran.starts, ran.row["worker_restarts"], ran.row["computed_requests"]) == (4, 3, 0)
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", "0")
    assert Ran(job)().exit_code == 0
    assert set(ran.computed.values()) == {1}
    assert {row["status"] for row in table(job)} == {"ok"}


def test_a_worker_that_dies_now_and_then_costs_no_row(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies(monkeypatch, 99, DIES_AT_STEP=3)
    ran = Ran(job)
    assert ran().exit_code == 0
    assert ran.row["worker_restarts"] >= 2
    assert {row["status"] for row in table(job)} == {"ok"}
    assert (len(ran.computed), set(ran.computed.values())) == (ROWS, {1})


@pytest.mark.parametrize("place", first_of((ROWS - 1, 0, 17), 1))
def test_a_row_that_kills_workers_becomes_an_error_row(
    tmp_path: Path, model: Path, job: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_DIES_OF_MORE_TOKENS", "100")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0")
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", "0")
    rows = people(ROWS)
    rows[place] |= {"text": "person " * 20}
    on_error = {"max_error_rate": 0.05}
    job = write_job(tmp_path, model, rows, input={"path": "in.jsonl", "id": "id"}, on_error=on_error)
    ran = Ran(job)
    assert ran().exit_code == 0
    found = table(job)
    assert [row["status"] for row in found] == ["error" if n == place else "ok" for n in range(ROWS)]
    bad = found[place]
    assert (bad["error_code"], bad["error_class"], bad["retryable"]) == ("engine_died", "engine", True)
    (told,) = (notice for notice in ran.notices if "error row (engine_died)" in notice)
    assert f"in.jsonl row {place} (id p{place})" in told
    starts = ran.starts
    assert Ran(job)().exit_code == 0
    assert ran.starts == starts, "an error that is stored is not run again unasked"


def test_neighbours_that_kill_workers_cost_themselves_alone(
    tmp_path: Path, model: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker runs an answered row again to show that it works: no table has heard of that."""
    monkeypatch.setenv("FAKE_ENGINE_DIES_OF_MORE_TOKENS", "100")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0")
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", "0")
    rows, killers = people(12), range(5, 9)
    for place in killers:
        rows[place] |= {"text": f"person {place} " * 20}
    job = write_job(
        tmp_path, model, rows, input={"path": "in.jsonl", "id": "id"}, on_error={"max_error_rate": 0.5}
    )
    ran = Ran(job)
    row = ran().row
    codes = ["engine_died" if place in killers else None for place in range(12)]
    assert [found["error_code"] for found in table(job)] == codes
    assert (row["computed_requests"], row["rows_error"]) == (12 - len(killers), len(killers))
    assert len(ran.computed) > 12 - len(killers), "no worker has run an answered row again"
    assert set(ran.computed.values()) == {1}
    (samples,) = (job.parent / "out/res-report").glob("requests-*.parquet")
    assert pq.read_table(samples).num_rows == 12 - len(killers)


def test_a_worker_that_dies_while_loading_is_replaced_once(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(monkeypatch, 1, DIES_LOADING=1)
    ran = Ran(job)
    assert ran().row["worker_restarts"] == 1
    assert any("exit status 3; it was loading the model; starting a new one" in text for text in ran.notices)
    assert len(table(job)) == ROWS


def test_a_worker_that_always_dies_while_loading_ends_the_job(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(monkeypatch, 99, DIES_LOADING=1)
    ran = Ran(job)
    with pytest.raises(BatchInferError, match="it was loading the model again, after a restart") as caught:
        ran()
    assert (caught.value.exit_code, ran.starts) == (69, 2)


def test_no_worker_is_started_after_a_signal(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies(monkeypatch, 99, DIES_AT_STEP=3)
    interrupts = Interrupts()
    ran = Ran(job, interrupts)
    take = Collector.take

    def signalled(self: Any, progress: Any) -> None:
        take(self, progress)
        interrupts.pending = signal.SIGTERM

    monkeypatch.setattr(Collector, "take", signalled)
    with pytest.raises(BatchInferError):
        ran()
    assert ran.starts == 1
    assert ran.row["worker_restarts"] == 0


def test_a_signal_while_a_new_worker_loads_is_not_waited_out(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs that could finish; what the first worker answered is stored."""
    dies(monkeypatch, 1, DIES_AT_STEP=3, RELOAD_S=8)
    interrupts = Interrupts()
    ran = Ran(job, interrupts)

    def signalled(plan: Any, prompts: Any, host: Any, *rest: Any) -> None:
        receive = host.receive

        def received(timeout_s: float) -> Any:
            heard = receive(timeout_s)
            if host.restarts:
                interrupts.pending = signal.SIGTERM
            return heard

        host.receive = received
        run_plan(plan, prompts, host, *rest)

    monkeypatch.setattr("batchinfer.pipeline.stages.answering.run_plan", signalled)
    with pytest.raises(Interrupted, match="15 answers are stored"):
        ran()
    assert (ran.row["exit_code"], ran.row["worker_restarts"]) == (143, 1)
    assert not [notice for notice in ran.notices if "rows being computed have" in notice]


def test_what_a_worker_refuses_it_is_not_asked_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_kit, "FAKE", pipeline_kit.NO_ENGINE)
    with pytest.raises(BatchInferError, match="must not need an engine"):
        Ran(job)()
    assert not (job.parent / "starts").exists()


def test_a_worker_that_dies_when_all_is_done_costs_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(monkeypatch, 0)
    monkeypatch.setenv("FAKE_ENGINE_DIES_LEAVING", "1")
    ran = Ran(job)
    row = ran().row
    assert (row["exit_code"], row["worker_restarts"], row["worker_peak_rss_bytes"]) == (0, 0, None)
    assert ran.starts == 1
