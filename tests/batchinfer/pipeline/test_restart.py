"""A dead worker is replaced: no row is lost or computed twice, and a row that kills workers is found."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, Interrupted
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.pipeline.workers.transport import PROCESSES
from batchinfer.report.progress import Progress
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, phases_of, table, write_job
from tests.examples import first_of

ROWS, BATCH = 40, 5
APART = replace(FAKE, transport=PROCESSES)

Faulty = Callable[..., None]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Inject faults into the first `deaths` starts of the fake engine, with five rows per step. Starts and computed
    rows are counted.
    """

    def ask(deaths: int, **faults: object) -> None:
        wanted = {"BATCH": BATCH, "STARTS": tmp_path / "starts", "LOG": tmp_path / "log", "DEATHS": deaths}
        for name, value in (wanted | faults).items():
            monkeypatch.setenv(f"FAKE_ENGINE_{name}", str(value))

    return ask


class Ran:
    """A run of a job, and its notices."""

    def __init__(self, path: Path, options: RunOptions = FAKE) -> None:
        self.notices: list[str] = []
        self.path, self.options, self.interrupts = path, options, Interrupts()

    def __call__(self) -> Any:
        progress = Progress(None, quiet=True)
        return run_job(load_job(self.path), self.options, progress, self.interrupts, self.notices.append)

    @property
    def row(self) -> dict[str, Any]:
        """The run table's row. A failed run has one, too."""
        newest = sorted((self.path.parent / "out/res-report").glob("run-*.parquet"))[-1]
        return dict(pq.read_table(newest).to_pylist()[0])

    @property
    def starts(self) -> int:
        return len((self.path.parent / "starts").read_bytes())

    @property
    def computed(self) -> Counter[str]:
        return Counter((self.path.parent / "log").read_text().split())

    def is_replaced_once(self) -> str:
        """Run the job, whose worker dies once. Check that no row is lost or computed twice. Return the notices."""
        outcome = self()
        assert (outcome.exit_code, self.starts, outcome.row["worker_restarts"]) == (0, 2, 1)
        assert {row["status"] for row in table(self.path)} == {"ok"}
        assert len(table(self.path)) == outcome.row["computed_requests"] == ROWS
        assert len(self.computed) == ROWS
        (told,) = (notice for notice in self.notices if "starting a new one" in notice)
        return told


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    return job_of(tmp_path, model, people(ROWS))


def job_of(folder: Path, model: Path, rows: list[dict[str, Any]], max_error_rate: float = 0.0) -> Path:
    on_error = {"max_error_rate": max_error_rate}
    return write_job(folder, model, rows, input={"path": "in.jsonl", "id": "id"}, on_error=on_error)


# A process takes longer for a step than the time between two messages of progress
SLOWLY = {"DELAY_S": 0.08}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "how", "words"),
    [
        (APART, {"DIES_BY": int(signal.SIGKILL), **SLOWLY}, "memory"),
        (FAKE, {"DIES_BY": int(signal.SIGSEGV)}, "SIGSEGV"),
        (FAKE, {}, "exit status 3"),
        (FAKE, {"RAISES": "RuntimeError"}, "asked to raise"),
    ],
    ids=["killed", "segfault", "exits", "raises"],
)
def test_a_worker_that_dies_once_is_replaced(
    job: Path, faulty: Faulty, options: RunOptions, how: dict[str, object], words: str
) -> None:
    faulty(1, DIES_AT_STEP=3, **how)
    ran = Ran(job, options)
    told = ran.is_replaced_once()
    assert set(ran.computed.values()) == {1}, "computed twice"
    assert words in told
    assert "in.jsonl row " in told
    assert "(id p" in told
    assert told.count(" row ") == 8
    assert "and 17 more rows" in told  # 15 of 40 were answered
    phases_of(ran.row)


@pytest.mark.parametrize("error", first_of(("MemoryError", "RuntimeError"), 1))
def test_the_traceback_of_a_replaced_engine_is_in_a_file_that_the_run_names(
    job: Path, faulty: Faulty, error: str
) -> None:
    faulty(2, DIES_AT_STEP=1, RAISES=error)
    ran = Ran(job)
    assert ran().exit_code == 0
    log = job.parent / "out/.batchinfer-res/engine_errors.log"
    told = [notice for notice in ran.notices if f"its traceback is in {log}; starting a new one" in notice]
    assert len(told) == 2
    assert len(re.findall(rf"Traceback .*?fake_engine\.py.*?\n{error}: ", log.read_text(), re.DOTALL)) == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the watchdog to 1.5 s. The fake engine's model has a short forecast."""
    monkeypatch.setattr("batchinfer.pipeline.workers.replica.SILENT_S", 1.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("step", first_of((3, 0), 1))
def test_an_engine_that_falls_silent_is_replaced_and_accuses_no_row(
    job: Path, faulty: Faulty, step: int
) -> None:
    """Its rows run again with other rows."""
    faulty(1, HANGS_AT_STEP=step, **SLOWLY)
    ran = Ran(job)
    told = ran.is_replaced_once()
    assert set(ran.computed.values()) == {1}
    assert "the engine's process was ended, because it made no progress for 2 s" in told


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_announces_a_long_wait_is_not_killed(job: Path, faulty: Faulty) -> None:
    """It captures, or compiles."""
    faulty(1, HANGS_AT_STEP=3, HANG_S=2.0, HANG_UNTIMED=1)
    ran = Ran(job)
    assert ran().exit_code == 0
    assert ran.starts == 1


LONG = "person " * 20  # a text of more than 100 tokens


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_row_that_hangs_engines_is_found(tmp_path: Path, model: Path, faulty: Faulty) -> None:
    """A group of rows runs separately after the engine fell silent twice while computing it."""
    faulty(0, HANGS_OF_MORE_TOKENS=100)
    rows = people(ROWS)
    rows[7] |= {"text": LONG}
    job = job_of(tmp_path, model, rows, max_error_rate=0.05)
    assert Ran(job)().exit_code == 0
    assert {row["custom_id"]: row["error_code"] for row in table(job) if row["status"] != "ok"} == {
        "p7": "engine_died"
    }


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_sends_is_replaced(job: Path, faulty: Faulty) -> None:
    """The driver received half of a message. The answers in it are lost and computed again."""
    faulty(1, DIES_AT_STEP=3, DIES_SENDING=1, **SLOWLY)
    Ran(job).is_replaced_once()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, 71), (signal.SIGABRT, 69)])
def test_a_worker_that_always_dies_ends_the_job_and_its_rows_are_named(
    job: Path, faulty: Faulty, by: signal.Signals, code: int
) -> None:
    faulty(99, DIES_AT_STEP=0, DIES_BY=int(by))
    ran = Ran(job)
    with pytest.raises(BatchInferError, match=r"it was computing only in\.jsonl row ") as caught:
        ran()
    assert caught.value.exit_code == code
    assert "it died 4 times in a row with little done in between" in str(caught.value)
    assert "same command resumes the job" in str(caught.value)
    assert (ran.starts, ran.row["worker_restarts"], ran.row["computed_requests"]) == (4, 3, 0)
    spent = phases_of(ran.row)
    assert spent["engine"] > 0
    assert "publish" not in spent
    faulty(0)
    assert Ran(job)().exit_code == 0
    assert set(ran.computed.values()) == {1}
    assert {row["status"] for row in table(job)} == {"ok"}


@pytest.mark.parametrize("place", first_of((ROWS - 1, 0, 17), 1))
def test_a_row_that_kills_workers_becomes_an_error_row(
    tmp_path: Path, model: Path, faulty: Faulty, place: int
) -> None:
    faulty(0, DIES_OF_MORE_TOKENS=100)
    rows = people(ROWS)
    rows[place] |= {"text": LONG}
    job = job_of(tmp_path, model, rows, max_error_rate=0.05)
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


@pytest.mark.slow
def test_neighbours_that_kill_workers_cost_only_themselves(
    tmp_path: Path, model: Path, faulty: Faulty
) -> None:
    """A worker runs an answered row again to prove that it works. That repetition appears in no table."""
    faulty(0, DIES_OF_MORE_TOKENS=100)
    rows, killers = people(12), range(5, 9)
    for place in killers:
        rows[place] |= {"text": f"person {place} " * 20}
    job = job_of(tmp_path, model, rows, max_error_rate=0.5)
    ran = Ran(job)
    row = ran().row
    codes = ["engine_died" if place in killers else None for place in range(12)]
    assert [found["error_code"] for found in table(job)] == codes
    assert (row["computed_requests"], row["rows_error"]) == (12 - len(killers), len(killers))
    assert len(ran.computed) > 12 - len(killers), "no worker has run an answered row again"
    assert set(ran.computed.values()) == {1}
    (samples,) = (job.parent / "out/res-report").glob("requests-*.parquet")
    assert pq.read_table(samples).num_rows == 12 - len(killers)


def test_a_worker_that_dies_while_loading_is_replaced_once(job: Path, faulty: Faulty) -> None:
    faulty(1, DIES_LOADING=1)
    assert "exit status 3; it was loading the model; starting a new one" in Ran(job).is_replaced_once()


def test_a_worker_that_always_dies_while_loading_ends_the_job(job: Path, faulty: Faulty) -> None:
    faulty(99, DIES_LOADING=1)
    ran = Ran(job)
    with pytest.raises(BatchInferError, match="it was loading the model again, after a restart") as caught:
        ran()
    assert (caught.value.exit_code, ran.starts) == (69, 2)


def test_a_signal_while_a_new_worker_loads_is_not_waited_out(
    job: Path, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No running row could finish. The answers of the first worker are stored."""
    faulty(1, DIES_AT_STEP=3, RELOAD_S=8, **SLOWLY)
    ran, receive = Ran(job), ReplicaPool.receive

    def received(pool: ReplicaPool, timeout_s: float) -> Any:
        heard = receive(pool, timeout_s)
        if pool.restarts:
            ran.interrupts.pending = signal.SIGTERM
        return heard

    monkeypatch.setattr(ReplicaPool, "receive", received)
    with pytest.raises(Interrupted, match="15 answers are stored"):
        ran()
    assert (ran.row["exit_code"], ran.row["worker_restarts"]) == (143, 1)
    assert not [notice for notice in ran.notices if "rows being computed have" in notice]


def test_a_worker_that_dies_when_all_is_done_costs_nothing(job: Path, faulty: Faulty) -> None:
    faulty(0, DIES_LEAVING=1)
    ran = Ran(job)
    row = ran().row
    assert (row["exit_code"], row["worker_restarts"], row["worker_peak_rss_bytes"]) == (0, 0, None)
    assert ran.starts == 1
