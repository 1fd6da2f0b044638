"""Tests two parallel runs with common rows: the second one waits, and computes only the rest."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.filesystem.durable import FileOps
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.store.answers.completion_store import read_records
from batchinfer.store.results.planned_work import announce_plans, find_similar_runs
from tests import warm_commands
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, write_job
from tests.batchinfer.wrong_jobs import Place, environment
from tests.patience import PATIENCE_S

NIGHT, OTHER = "2026-01-01", "2026-01-02"
WAITING = "another run is already computing these rows"


class Run:
    """A run for a date, in a thread."""

    def __init__(self, path: Path, date: str, options: RunOptions) -> None:
        self.told: list[str] = []
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, args=(path, date, options))
        self._thread.start()

    def _run(self, path: Path, date: str, options: RunOptions) -> None:
        job, progress = load_job(path, (), date), Progress(io.StringIO(), quiet=True)
        self.outcome = run_job(job, options, progress, Interrupts(), self.told.append)

    def waits(self) -> bool:
        """Return True if the run waits for another one before it ends."""
        while self._thread.is_alive() and not any(WAITING in line for line in self.told):
            time.sleep(0.01)
        return self._thread.is_alive()

    def ended(self) -> Outcome:
        self._thread.join(60)
        assert self.outcome is not None
        return self.outcome


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    return write_job(tmp_path, model, people(6), output={"path": "out/res/${date}"})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "out/.batchinfer-res/completions"


def planned(folder: Path, keys: list[bytes]) -> Path:
    path = folder / "plan.parquet"
    pq.write_table(pa.table({"key": pa.array(keys, pa.binary(32))}), path)
    return path


def hidden(store: Path, aside: Path) -> tuple[list[bytes], Callable[[], None]]:
    """Move the answers out of a store; return their keys, and a function that restores them."""
    parts = sorted(read_records(store)[0])
    keys = [key for part in parts for key in pq.read_table(part)["key"].to_pylist()]
    moves = [(file, aside / file.name) for part in parts for file in (part, part.with_suffix(".json"))]
    aside.mkdir()
    for file, place in moves:
        file.rename(place)
    return keys, lambda: [place.rename(file) for file, place in moves] and None


@pytest.mark.slow
@pytest.mark.parametrize("answered", [True, False])
def test_the_second_run_takes_the_answers_of_the_first_and_computes_the_rest(
    job: Path, store: Path, tmp_path: Path, answered: bool
) -> None:
    """It starts no engine for rows that the first run has answered."""
    Run(job, NIGHT, FAKE).ended()
    keys, put_back = hidden(store, tmp_path / "aside")
    with announce_plans(store, [planned(tmp_path, keys)], FileOps()):
        second = Run(job, OTHER, NO_ENGINE if answered else FAKE)
        assert second.waits()
        if answered:
            put_back()
    assert second.ended().row["exit_status"] == "published"
    assert second.ended().row["reused_requests"] == (6 if answered else 0)


def test_a_killed_run_is_not_waited_for(job: Path, store: Path, tmp_path: Path) -> None:
    Run(job, NIGHT, FAKE).ended()
    keys, _ = hidden(store, tmp_path / "aside")
    left = store / "planned" / "00000000000000000001-1.json"
    left.write_text('{"plan": "' + str(planned(tmp_path, keys)) + '"}')
    second = Run(job, OTHER, FAKE)
    assert not second.waits()
    assert second.ended().row["computed_requests"] == 6
    assert not left.exists()


def test_two_processes_compute_nothing_twice(place: Place) -> None:
    """Two dates start at once, in separate commands."""
    place.job(output="output: {path: 'out/res/${date}'}", prompt='prompt: {user: "{{ text }}"}')
    place.rows(*({"id": f"r{n}", "text": "a" * (n + 1)} for n in range(40)))
    slow = environment(FAKE_ENGINE_BATCH="5", FAKE_ENGINE_DELAY_S="0.1")
    command = [
        sys.executable,
        "-m",
        "tests.fake_cli",
        "run",
        str(place.folder / "job.yaml"),
        "--json",
        "--date",
    ]
    both = [
        warm_commands.start(
            [*command, date], env=slow, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for date in (NIGHT, OTHER)
    ]
    told = [run.communicate(timeout=PATIENCE_S) for run in both]
    assert [run.returncode for run in both] == [0, 0], told
    ends = [json.loads(out.splitlines()[-1]) for out, _ in told]
    assert sorted((end["computed_requests"] or 0, end["reused_requests"]) for end in ends) == [
        (0, 40),
        (40, 0),
    ], told
    texts = [pq.read_table(place.results / date)["generated_text"] for date in (NIGHT, OTHER)]
    assert texts[0].equals(texts[1])


@pytest.mark.parametrize(
    ("mine", "theirs", "same", "waits"),
    [(10, 10, 10, True), (10, 10, 5, True), (10, 10, 4, False), (10, 100, 10, False), (100, 10, 10, False)],
)
def test_only_runs_that_do_mostly_the_same_wait(
    tmp_path: Path, mine: int, theirs: int, same: int, waits: bool
) -> None:
    """A trial of a few rows does not wait for the whole job."""
    keys = [number.to_bytes(32, "big") for number in range(mine + theirs)]
    (tmp_path / "mine").mkdir()
    with announce_plans(tmp_path, [planned(tmp_path, keys[mine - same : mine - same + theirs])], FileOps()):
        plan = planned(tmp_path / "mine", keys[:mine])
        with announce_plans(tmp_path, [plan], FileOps()) as mine_too:
            others = mine_too.others
            assert len(others) == 1
            assert bool(find_similar_runs(plan, others, tmp_path / "spill")) == waits
            (tmp_path / "plan.parquet").unlink()
            if not waits:
                return
    assert find_similar_runs(plan, others, tmp_path / "spill") == [], "it has gone, and its plan with it"
