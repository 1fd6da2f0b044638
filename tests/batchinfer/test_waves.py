"""Runs whole jobs whose rows run while the input is read, and compares results with a single plan."""

from __future__ import annotations

import gzip
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import ErrorBudgetExceeded, InputCorrupt, Interrupted, TooFewRows
from batchinfer.job import load_job
from batchinfer.pipeline.plans import run_plans, waves
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers import replica_pool
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.store.index import ingest
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from tests.batchinfer.pipeline.test_pipeline import FAKE, run, table, write_job
from tests.batchinfer.test_ladder_job import LADDER, PROMPT
from tests.examples import first_of
from tests.memory_transport import FakeTransport

IN_WAVES = replace(FAKE, waves_from_s=0.0)
ROWS, AT_A_TIME, AT_ONCE = 600, 100, 10  # in the input, read at a time, run at a time
SAMPLED = {"sampling": {"max_tokens": 8, "temperature": 0.7}}
SAME = (
    "rows", "rows_ok", "rows_error", "error_codes", "distinct_requests", "duplicate_rows", "reused_requests",
    "computed_requests", "duplicate_saved_tokens", "duplicate_saved_output_tokens",
)  # fmt: skip


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use slow engines with an even slower input; return the log of computed keys."""
    steps = Ingestion.steps

    def slow(self: Ingestion) -> Generator[IngestProgress, None, None]:
        self._options = replace(self._options, chunk=replace(self._options.chunk, lines=AT_A_TIME))
        for at in steps(self):
            yield at
            time.sleep(0.06)

    monkeypatch.setattr(ingest.Ingestion, "steps", slow)
    monkeypatch.setattr(
        waves, "MOST_AGAIN", 1.0
    )  # prompts are so short that any number in them is a beginning
    # few rows at a time: engines get some during planning
    monkeypatch.setattr(run_plans, "REQUEST_BATCH", AT_ONCE)
    monkeypatch.setattr(replica_pool, "max_queued_requests", lambda _: 3 * AT_ONCE)
    monkeypatch.setenv("FAKE_ENGINE_BATCH", str(AT_ONCE))
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.004")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def rows() -> list[Any]:
    """Return rows with repeated texts, repeated ids and mistakes.

    Every seventh row is one of 97 repeated ones, and every eleventh has an earlier id.
    """
    found: list[Any] = [
        {"id": f"p{n - 7 if n % 11 == 10 else n}", "text": f"person {n % 97 if n % 7 == 0 else n}", "age": n}
        for n in range(ROWS)
    ]
    found[10] = "{not json"
    found[500] = {"id": "late", "text": None, "age": 1}
    return found


def job(folder: Path, model: Path, given: list[Any] | None = None, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_job(
        folder,
        model,
        rows() if given is None else given,
        **{
            "input": {"path": "in.jsonl", "id": "id", "unique_ids": True},
            "output": {"path": "out/res", "columns": ["age"], "rows_per_file": 250},
            "on_error": {"max_error_rate": 0.5},
            **sections,
        },
    )


def published(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))]


def keys(path: Path) -> Any:
    """Return the key of each row, from the newest report."""
    newest = sorted((path.parent / "out/res-report").glob("rows-*.parquet"))[-1]
    return pq.read_table(newest).drop_columns(["run_id"])


def computed(log: Path) -> set[str]:
    found = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    assert len(found) == len(set(found)), "something was computed twice"
    return set(found)


@pytest.mark.parametrize("sections", [
    pytest.param({**SAMPLED, "engine": {"data_parallel": 2}}, id="equal samples of two engines"),
    pytest.param(SAMPLED, id="equal samples", marks=pytest.mark.slow),
    pytest.param({}, id="greedy", marks=pytest.mark.slow),
])  # fmt: skip
def test_waves_publish_the_result_of_one_plan(
    tmp_path: Path, model: Path, log: Path, sections: dict[str, Any]
) -> None:
    outcomes: list[Outcome] = []
    paths = [job(tmp_path / name, model, **sections) for name in ("waves", "once")]
    work = []
    for path, options in zip(paths, (IN_WAVES, FAKE), strict=True):
        outcomes.append(run(path, options))
        work.append(computed(log))
    many, once = (outcome.row for outcome in outcomes)
    assert many["waves"] >= 2
    assert once["waves"] is None
    assert published(paths[0]) == published(paths[1])
    assert keys(paths[0]).equals(keys(paths[1]))
    assert work[0] == work[1]
    assert {name: many[name] for name in SAME} == {name: once[name] for name in SAME}


@pytest.mark.slow
def test_rows_run_again_in_waves(
    tmp_path: Path, model: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with truncated answers run again next to rows that were read later."""
    monkeypatch.setenv("FAKE_ENGINE_LEVELS", "4")
    given = [{"id": f"r{n}", "ids": [20 + n % 100, 20 + n // 100]} for n in range(ROWS)]
    sections = {"on_invalid": LADDER, "prompt": PROMPT, "output": {"path": "out/res"}}
    paths = [job(tmp_path / name, model, given, **sections) for name in ("waves", "once")]
    outcome = run(paths[0], IN_WAVES)
    first = computed(log)
    run(paths[1], FAKE)
    assert outcome.row["waves"] >= 2
    assert published(paths[0]) == published(paths[1])
    assert first == computed(log)
    assert {row["attempt"] for row in table(paths[0])} == {1, 2, 3}


class Counting(Progress):
    """Records the final number of answered rows, their total, and whether there were more."""

    ended: tuple[int, int | None, bool] | None = None

    def close(self) -> None:
        if self._work is not None and self._work.phase == "running":
            self.ended = self._work.rows, self._work.total_rows, self._work.more
        super().close()


def test_all_rows_have_their_answers_at_the_end(tmp_path: Path, model: Path) -> None:
    """Some rows are duplicates of earlier waves, or were answered during planning."""
    progress, notices = Counting(None, quiet=True), list[str]()
    path = job(tmp_path / "job", model, deadline="2999-01-01T06:00")
    outcome = run_job(load_job(path), IN_WAVES, progress, Interrupts(), notices.append)
    good = outcome.row["rows_ok"]
    assert outcome.row["waves"] >= 2
    assert progress.ended == (good, good, False)
    assert outcome.row["forecast_revised_s"] is not None
    assert sum(notice.startswith("deadline: 2999-01-01 06:00") for notice in notices) == 1
    assert outcome.row["deadline_met"]
    assert outcome.row["computed_requests"] <= outcome.row["deadline_rows"] <= good


class Stopping(Progress):
    """Sends a signal once this number of rows is answered."""

    def __init__(self, interrupts: Interrupts, rows: int) -> None:
        super().__init__(None, quiet=True)
        self._interrupts, self._left = interrupts, rows

    def finished(self, **what: Any) -> None:
        super().finished(**what)
        self._left -= 1
        if not self._left:
            self._interrupts.pending = 2


@pytest.mark.parametrize("answers", first_of([150, 25, 350], 1))
def test_work_of_a_stopped_run_is_not_repeated(tmp_path: Path, model: Path, log: Path, answers: int) -> None:
    path, interrupts = job(tmp_path / "job", model), Interrupts()
    with pytest.raises(Interrupted, match="answers are stored"):
        run_job(load_job(path), IN_WAVES, Stopping(interrupts, answers), interrupts, lambda _: None)
    before = computed(log)
    assert answers <= len(before) < 500
    outcome = run(path, IN_WAVES)
    assert not before & computed(log)
    assert outcome.row["reused_requests"] == len(before)
    assert len(table(path)) == ROWS


def test_too_many_error_rows_end_the_run_once_they_are_read(tmp_path: Path, model: Path, log: Path) -> None:
    transport = FakeTransport()
    given = [{"id": str(n), "text": None if n >= 400 else f"person {n}"} for n in range(ROWS)]
    path = job(tmp_path / "job", model, given, on_error={"max_error_rate": 0.1}, output={"path": "out/res"})
    with pytest.raises(ErrorBudgetExceeded, match="200 of 600 rows are errors"):
        run(path, replace(IN_WAVES, transport=transport))
    assert all(link.closed for link in transport.started)
    assert computed(log), "rows had been read that could run"


def test_an_input_that_is_damaged_at_its_end_ends_the_run(tmp_path: Path, model: Path, log: Path) -> None:
    transport = FakeTransport()
    path = job(tmp_path / "job", model, input={"path": "in.jsonl.gz"})
    whole = gzip.compress((path.parent / "in.jsonl").read_bytes())
    (path.parent / "in.jsonl.gz").write_bytes(whole[:-100])
    with pytest.raises(InputCorrupt):
        run(path, replace(IN_WAVES, transport=transport))
    assert all(link.closed for link in transport.started)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shares", [True, False])
def test_rows_that_share_with_rows_far_away_wait_for_them(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Every fifth row shares a long prefix with one of the first rows: it would be computed twice. Without
    prefix sharing, rows do not wait."""
    monkeypatch.setattr(waves, "MOST_AGAIN", 0.05)
    long = [f"{n} " + "and so on " * 8 for n in range(120)]
    given = [{"id": str(n), "text": f"{long[n % 120]} {n}"} for n in range(ROWS)]
    notices: list[str] = []
    engine = {"enable_prefix_caching": shares}
    path = job(tmp_path / "job", model, given, output={"path": "out/res"}, engine=engine)
    outcome = run_job(load_job(path), IN_WAVES, Progress(None, quiet=True), Interrupts(), notices.append)
    waits = any("because rows that share a beginning lie far apart" in notice for notice in notices)
    assert waits == shares
    assert (outcome.row["waves"] == 1) == shares
    assert outcome.row["again_tokens"] == 0


@pytest.mark.slow
def test_too_few_rows_are_refused_and_what_ran_in_waves_stays_stored(
    tmp_path: Path, model: Path, log: Path
) -> None:
    path = job(tmp_path / "job", model)
    with pytest.raises(TooFewRows, match=f"has {ROWS} rows, and the job needs at least {ROWS + 1}"):
        run(path, IN_WAVES, ("input.min_rows", str(ROWS + 1)))
    assert not published(path)
    stored = computed(log)
    assert stored
    assert run(path, FAKE, ("input.min_rows", str(ROWS))).row["reused_requests"] > 0
    assert not stored & computed(log)
