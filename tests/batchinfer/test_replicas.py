"""Tests that several engines share a job's work: equal rows, none lost or repeated, with deaths and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.pipeline.options import RunOptions
from batchinfer.report.summary import PHASES
from tests import warm_commands
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, run, table, write_job
from tests.batchinfer.wrong_jobs import alive, children, environment, hears_signals
from tests.examples import first_of
from tests.patience import PATIENCE_S, wait_until

TWO = ("engine.data_parallel", "2")
ROWS = 60

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) < 2,
    reason="two engines need two cores",
)


def report(path: Path, name: str) -> list[dict[str, Any]]:
    newest = sorted((path.parent / "out/res-report").glob(f"{name}-*.parquet"))[-1]
    return list(pq.read_table(newest).to_pylist())


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of sixty rows, five per step. Computed rows are logged."""
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "5")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.06")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_ENGINE_STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("FAKE_ENGINE_DEATHS", "0")
    return write_job(tmp_path, model, people(ROWS), input={"path": "in.jsonl", "id": "id"})


def computed(job: Path) -> Counter[str]:
    return Counter((job.parent / "log").read_text().split())


def test_two_engines_share_the_work_and_the_report_shows_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_TOGETHER", "2")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.2")  # delays of one engine are short compared with its share
    row = run(job, FAKE, TWO).row
    assert len(table(job)) == ROWS
    assert set(computed(job).values()) == {1}
    steps, requests = report(job, "steps"), report(job, "requests")
    assert {(one["engine"], one["replica"]) for one in steps} == {(0, 0), (1, 1)}
    each = Counter(one["replica"] for one in requests)
    assert each.total() == ROWS
    assert min(each.values()) >= ROWS // 4
    assert (row["replicas"], row["worker_restarts"], row["computed_requests"]) == (2, 0, ROWS)
    walls = [
        max(one["ended_s"] for one in steps if one["replica"] == n)
        - min(one["started_s"] for one in steps if one["replica"] == n)
        for n in (0, 1)
    ]
    assert row["engine_wall_s"] == pytest.approx(max(walls), rel=0.02)
    assert row["model_s"] == pytest.approx(sum(one["model_s"] for one in steps) / 2)
    assert row["model_s"] + row["overhead_s"] + row["idle_s"] == pytest.approx(row["engine_wall_s"])
    assert sum(row[f"{name}_s"] or 0.0 for name in PHASES) == pytest.approx(row["wall_s"], rel=0.01)
    parts = [row[f"wall_{part}_s"] for part in ("load", "input", "device", "host", "output")]
    assert sum(parts) == pytest.approx(row["wall_s"], rel=0.01)
    assert sum(one["engine_s"] for one in report(job, "buckets")) == pytest.approx(row["engine_wall_s"])
    assert sum(one["device_s"] for one in report(job, "phases")) == pytest.approx(row["model_s"])


def test_at_most_one_engine_per_row_is_started(tmp_path: Path, job: Path) -> None:
    row = run(job, FAKE, TWO, ("input.limit", "1")).row
    assert (row["replicas"], row["rows_ok"]) == (1, 1)
    assert (tmp_path / "starts").read_text().count(".") == 1


def test_a_signal_ends_all_engines_and_the_next_run_resumes(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, people(400))
    command = [sys.executable, "-m", "tests.fake_cli", "run", "job.yaml", "--set", "=".join(TWO)]
    slow = environment(
        FAKE_ENGINE_DELAY_S="0.3", FAKE_ENGINE_BATCH="2", FAKE_ENGINE_LOG=str(tmp_path / "log")
    )
    with warm_commands.start(
        command, cwd=tmp_path, text=True, start_new_session=True, env=slow, preexec_fn=hears_signals,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "log").exists)
        below = list(children(process.pid))
        os.killpg(process.pid, signal.SIGTERM)
        try:
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 143, err
    assert len(below) >= 2
    wait_until(lambda: not alive(below))
    again = run(job, FAKE, TWO).row
    assert 0 < again["reused_requests"] < 400, "at the signal the engines leave what they have not begun"
    assert len(table(job)) == 400
    assert again["reused_requests"] + again["computed_requests"] == 400


def test_more_engines_than_cores_are_refused_before_anything_is_read(job: Path) -> None:
    with pytest.raises(JobFileError, match=r"200 engines need 200 cores, but this process may use only \d+"):
        run(job, FAKE, ("engine.data_parallel", "200"))
    with pytest.raises(JobFileError, match="2 engines need 2 cores, but this process may use only 1"):
        run(job, FAKE, TWO, ("engine.threads", "1"))


@pytest.mark.parametrize("deterministic", first_of((True, False), 1))
def test_real_engines_give_the_same_rows_as_one(
    tmp_path: Path, model: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine is killed. Greedy rows in float32, and sampled rows in deterministic mode."""
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    sampled = {"temperature": 1.2, "logprobs": 2} if deterministic else {}
    real, found = RunOptions().engine, []
    for engines, factory in (("1", real), ("2", "tests.batchinfer.test_replicas:mortal")):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        job = write_job(
            folder, model, people(24), sampling={"max_tokens": 12, "ignore_eos": True, **sampled},
            engine={"max_num_seqs": 8, "deterministic": deterministic},
        )  # fmt: skip
        settings = (("engine.data_parallel", engines), ("model.dtype", "float32"))
        row = run(job, RunOptions(engine=factory), *settings).row
        killed = int(factory != real)
        assert (row["replicas"], row["rows_ok"], row["worker_restarts"]) == (int(engines), 24, killed)
        found.append(table(job))
    assert found[0] == found[1]


def mortal(*arguments: Any) -> Any:
    """Load a real engine in its own process. The first engine that finishes rows is killed at its next step."""
    from batchinfer.engine.load.build import load_weights
    from batchinfer.engine.loop.engine import Engine

    step, finished = Engine.step, list[Any]()

    def dying(self: Engine) -> Any:
        if finished and _first():
            os.kill(os.getpid(), signal.SIGKILL)
        output = step(self)
        finished.extend(output.completions)
        return output

    Engine.step = dying  # type: ignore[method-assign]
    return load_weights(*arguments)


def _first() -> bool:
    """Return True if no process was killed before."""
    try:
        os.close(os.open(os.environ["DIED"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
