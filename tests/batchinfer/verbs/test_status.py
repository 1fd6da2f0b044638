"""`batchinfer status` and last_run.json: the state of a run for other programs."""

from __future__ import annotations

import io
import json
import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli import status_verb
from batchinfer.core.errors import Interrupted, StorageError
from batchinfer.core.samples import StepSample
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.state import StateFolder
from batchinfer.pipeline.progress_file import PROGRESS_FORMAT
from batchinfer.report.progress import RECORD_EVERY_S, Progress, ProgressState
from batchinfer.verbs.status import RunStatus, Standing, prometheus_lines, status_of, write_prometheus
from tests.batchinfer.cli.test_cli import SLOW, committed, long_job, started
from tests.batchinfer.wrong_jobs import FAKE, ROWS, CliOf, Command, Place
from tests.patience import PATIENCE_S, wait_until

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(FAKE)


def last_run(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / "out/res-report/last_run.json").read_text())
    return found


def test_a_run_is_seen_while_it_works_and_after_a_signal(place: Place, run: Command) -> None:
    long_job(place)
    job, prom = place.folder / "job.yaml", place.folder / "x.prom"
    with started(place, "run", "job.yaml", **SLOW) as process:
        wait_until(lambda: committed(place) >= 8)
        wait_until(lambda: (status_of(place.results).tokens or 0) > 0)
        told = json.loads(run("status", place.results, "--json", "--prometheus", prom).out)
        assert (told["state"], told["phase"], told["pid"]) == ("running", "running", process.pid)
        assert told["exit_code"] is None
        assert 0 < told["rows"] < told["rows_total"]
        assert 0 < told["share"] < 1
        assert told["memory_bytes"] > 10 << 20
        shown = run("status", job).out
        assert re.search(r"nightly: running\n", shown)
        assert "tokens" in shown
        assert samples(prom.read_text())["batchinfer_running"] == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    told = json.loads(run("status", job, "--json").out)
    assert (told["state"], told["exit_code"], told["exit_status"]) == ("interrupted", 130, "interrupted")
    ended = last_run(place)
    assert (ended["exit_code"], ended["run_id"], ended["output"]) == (130, told["run_id"], str(place.results))
    assert "the same command continues" in ended["message"]
    assert ended["message"].startswith(f"interrupted; {told['rows']} answers are stored")
    assert run("run", job, "-q").code == 0
    ended = status_of(place.results)
    assert (ended.state, ended.rows, ended.phase, ended.share) == ("finished", ended.rows_total, None, None)
    shown = run("status", job).out
    assert "phase" not in shown
    assert re.search(r"started  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", shown)
    assert (last_run(place)["exit_code"], last_run(place)["message"]) == (0, None)


def test_errors_are_counted_by_code(place: Place, run: Command) -> None:
    place.job("on_error: {max_error_rate: 0.01}")
    place.rows(*ROWS, {"id": "x"}, b"{")
    assert run("run", place.folder / "job.yaml", "-q").code == 65
    told = json.loads(run("status", place.results, "--json").out)
    assert (told["state"], told["exit_status"]) == ("failed", "over budget")
    assert last_run(place)["exit_code"] == 65
    assert "error" in last_run(place)["message"]
    place.job("on_error: {max_error_rate: 0.5}")
    assert run("run", place.folder / "job.yaml", "-q").code == 0
    told = json.loads(run("status", place.results, "--json").out)
    assert (told["state"], sum(told["errors"].values())) == ("finished", 2)


@pytest.mark.parametrize(
    "damage", [{"rows": "many"}, {"errors": [1]}, {"output": None}, {"updated_at": "yesterday"}], ids=str
)
def test_a_damaged_progress_file_is_named(damage: dict[str, Any], tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    state.progress.parent.mkdir(parents=True)
    whole = {
        "format": PROGRESS_FORMAT,
        "output": str(state.results),
        "updated_at": "2026-11-29T06:00:00+00:00",
    }
    state.progress.write_text(json.dumps(whole))
    assert status_of(state.results).state == "crashed"
    state.progress.write_text(json.dumps({**whole, **damage}))
    with pytest.raises(StorageError, match=r"progress\.json: this version cannot read this progress file"):
        status_of(state.results)


@pytest.mark.slow
def test_a_run_that_finds_everything_done_says_so(place: Place, run: Command) -> None:
    for status, report in (("published", True), ("already published", False)):
        assert run("run", place.folder / "job.yaml", "-q").code == 0
        ended = last_run(place)
        assert (ended["exit_status"], ended["report"] is not None) == (status, report)
    assert Path(json.loads(run("run", place.folder / "job.yaml", "--json").out)["output"]) == place.results


def test_before_the_first_run_and_long_after_the_last(place: Place, run: Command) -> None:
    before = run("status", place.results)
    assert (before.code, "no run of this job has begun yet" in before.err) == (66, True)
    assert run("run", place.folder / "job.yaml", "-q").code == 0
    (place.state / "progress.json").unlink()
    assert (status_of(place.results).state, status_of(place.results).rows) == ("finished", 20)


@pytest.mark.slow
def test_a_dated_job_is_found_by_its_root(place: Place, run: Command) -> None:
    place.job(output="output: {path: 'out/res/${date}'}")
    for day in ("2026-03-01", "2026-03-02"):
        assert run("run", place.folder / "job.yaml", "-q", "--date", day).code == 0
    told = json.loads(run("status", place.results, "--json").out)
    assert told["output"].endswith("res/2026-03-02")
    assert status_of(place.results / "2026-03-01").output.endswith("res/2026-03-01")


def test_a_failing_disk_is_reported_once_and_fails_no_run(
    place: Place, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FileOps.open

    def failing(self: FileOps, path: Path) -> int:
        if path.name.startswith("progress.json"):
            raise OSError(28, "No space left on device")
        return right(self, path)

    monkeypatch.setattr(FileOps, "open", failing)
    ended = run("run", place.folder / "job.yaml")
    assert ended.code == 0
    assert ended.err.count("`batchinfer status` will not show this run's progress") == 1


# --- watching

WATCHED: list[Standing] = ["running", "running", "finished"]


def test_watching_ends_with_the_run(place: Place, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([RunStatus(state, "/d/res") for state in WATCHED])
    monkeypatch.setattr("batchinfer.verbs.status.status_of", lambda _: next(seen))
    monkeypatch.setattr(status_verb, "WATCH_EVERY_S", 0)
    ended = run("status", place.results, "--watch", "--json")
    assert [json.loads(line)["state"] for line in ended.out.splitlines()] == WATCHED


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_quietly(
    signum: int, code: int, place: Place, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise Interrupted(signum, "interrupted")

    monkeypatch.setattr("batchinfer.verbs.status.status_of", lambda _: RunStatus("running", "/d/res"))
    monkeypatch.setattr(status_verb.time, "sleep", interrupted)
    ended = run("status", place.results, "--watch")
    assert (ended.code, ended.err == "") == (code, code == 0)


# --- the record


def test_progress_is_recorded_at_each_phase_and_every_two_seconds() -> None:
    now, kept = [0.0], list[ProgressState]()
    with Progress(io.StringIO(), quiet=True, clock=lambda: now[0]) as progress:
        progress.recorded_by(kept.append)
        progress.phase("planning")
        progress.running(rows=10, prompt_tokens=100, expected_tokens=100)
        for _ in range(100):
            now[0] += 0.1
            progress.step(step())
        progress.failed({"bad_json": 2})
        progress.finished(expected_tokens=10, completion_tokens=5, rows=3, error="nan_logits")
        progress.phase("publishing", 10)
    assert [state.phase for state in kept][:2] == ["planning", "running"]
    assert len(kept) == pytest.approx(3 + 10 / RECORD_EVERY_S, abs=1)
    running = [state for state in kept if state.phase == "running"][-1]
    assert running.per_s == pytest.approx(10, rel=0.1)
    assert running.tokens_total == 200
    assert kept[-1].errors == {"bad_json": 2, "nan_logits": 3}


def step() -> StepSample:
    from tests.batchinfer.report.conftest import make_step

    return make_step(prefill_tokens=0, recomputed_tokens=0, cached_tokens=0, sampled_tokens=1)


# --- Prometheus

SAMPLE = re.compile(r'([a-z_:][a-z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)', re.IGNORECASE)


def samples(text: str) -> dict[str, float]:
    """Parse the exposition format strictly. Return values by name, or by name{code} for error codes."""
    found, typed = {}, None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed = line.split()[2]
            assert line.split()[3] == "gauge"
        elif not line.startswith("# HELP batchinfer_"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == typed
            code = re.search(r'code="([^"]*)"', match[2])
            found[match[1] + (f"{{{code[1]}}}" if code else "")] = float(match[3])
    return found


def test_the_prometheus_text_can_be_parsed(tmp_path: Path) -> None:
    status = RunStatus(
        "running", '/d/"odd"\\name\n', "job", started_at=NOW.isoformat(), rows=3, rows_total=10, share=0.3, left_s=1.5,
        errors={"bad_json": 2, "too_long": 1}, memory_bytes=1 << 40,
    )  # fmt: skip
    found = samples("".join(f"{line}\n" for line in prometheus_lines(status)))
    assert found["batchinfer_start_time_seconds"] == NOW.timestamp()
    assert (found["batchinfer_rows"], found["batchinfer_progress_ratio"]) == (3, 0.3)
    assert found["batchinfer_memory_bytes"] == 1 << 40
    assert (found["batchinfer_error_rows{bad_json}"], found["batchinfer_error_rows{too_long}"]) == (2, 1)
    assert "batchinfer_exit_code" not in found
    write_prometheus(status, tmp_path / "x.prom")
    assert [path.name for path in tmp_path.iterdir()] == ["x.prom"]
    assert samples((tmp_path / "x.prom").read_text()) == found
