"""`batchinfer history`: comparable runs, and the threshold for a slower run."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.machine.hardware import Hardware
from batchinfer.report.history import LEAST_S, PastRun, compare, comparison_lines
from batchinfer.report.tables.folder import new_run_id
from batchinfer.report.tables.tables import run_row, write_run
from batchinfer.verbs.history import history_of, share_of
from batchinfer.verbs.query import open_answer
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, CliOf, Command, Place

START = datetime(2026, 3, 1, 22, 30, tzinfo=UTC)


def past(speed: float = 1000.0, engine_s: float = 60.0, output_share: float = 0.5, **facts: Any) -> PastRun:
    """Return a run that computed `speed` tokens per second for `engine_s` seconds."""
    tokens = round(speed * engine_s)
    output = round(tokens * output_share)
    known: dict[str, Any] = {
        "run_id": "r", "job": "orders", "model": "org/m@c", "dtype": "bfloat16", "quantization": "none",
        "hardware": "Test CPU", "cores": 2, "peak_flops_per_s": 1e12, "trial": False, "exit_status": "published",
        "tokens": tokens, "output_tokens": output, "total_tokens_per_s": speed, "engine_wall_s": engine_s,
    }  # fmt: skip
    return PastRun(**known | facts)


def test_noise_passes_and_a_slowdown_fails() -> None:
    """±5 % per night; then a run of the usual duration, or 25 % longer."""
    for seed in range(20):
        noise = random.Random(seed)
        nights = [past(1000 * noise.uniform(0.95, 1.05)) for _ in range(noise.randint(4, 13))]
        newest = 1000 * noise.uniform(0.95, 1.05)
        assert not compare([*nights, past(newest)]).slower_than(0.1), seed
        assert compare([*nights, past(newest / 1.25)]).slower_than(0.1), seed


@pytest.mark.parametrize(("changes", "reason"), [
    ({"trial": True}, "a trial"),
    ({"engine_s": LEAST_S / 2}, "computed for less than 5 s"),
    ({"speed": 0.0}, "computed nothing"),
    ({"exit_status": "interrupted"}, "did not finish"),
    ({"dtype": "float32"}, "another dtype"),
    ({"quantization": "int8"}, "another quantization"),
    ({"model": "org/m@d"}, "another model"),
    ({"engine_s": 600.0}, "over 4 times more or less work"),
    ({"output_share": 0.2}, "another mixture of prompt and output tokens"),
    ({"output_share": 0.0}, "another mixture of prompt and output tokens"),
    ({"hardware": "Other CPU", "peak_flops_per_s": None}, "another machine, and the peak of one is unknown"),
])  # fmt: skip
def test_what_cannot_be_compared_is_left_out_and_named(changes: dict[str, Any], reason: str) -> None:
    found = compare([*[past()] * 3, past(**({"speed": 3000.0} | changes)), past()])
    assert (found.before, found.change) == (3, pytest.approx(0, abs=1e-3))
    assert found.left_out == {reason: 1}
    assert [*comparison_lines(found)][-1] == f"not compared: 1 ({reason})"


def test_the_newest_run_that_computed_enough_is_judged() -> None:
    found = compare([*[past()] * 4, past(700, run_id="slow"), past(5000, trial=True), past(10, engine_s=0.5)])
    assert (found.run_id, found.slower_than(0.1)) == ("slow", True)


def test_another_machine_is_compared_by_its_peak() -> None:
    newest = past(1900, hardware="Twice as fast", peak_flops_per_s=2e12)
    assert compare([*[past()] * 4, newest]).change == pytest.approx(-0.05)


def test_a_peak_that_was_measured_again_is_no_change_of_speed() -> None:
    assert compare([*[past()] * 4, past(peak_flops_per_s=1.3e12)]).change == pytest.approx(0)


def test_speed_is_compared_with_the_last_runs() -> None:
    """An old slowdown must not fail every later night."""
    assert not compare([*[past(2000)] * 12, *[past()] * 10, past(990)]).slower_than(0.1)


class Runs:
    """Writes run tables, one per night."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.nights = 0

    def add(self, *speeds: float) -> Path:
        """Write runs of one minute at these speeds in tokens per second. Return the last table."""
        for speed in speeds:
            started = START + timedelta(days=self.nights)
            self.nights += 1
            facts = {
                "run_id": new_run_id(started), "job": "orders", "output": "/d/res", "started_at": started,
                "finished_at": started + timedelta(seconds=65), "exit_code": 0, "exit_status": "published",
                "model": "org/m@c", "dtype": "bfloat16", "trial": False, "rows": 100, "engine_s": 60.0,
            }  # fmt: skip
            measured = {"prompt_tokens_run": 30 * speed, "output_tokens": 30 * speed, "engine_wall_s": 60.0}
            machine = Hardware("Test CPU", "cpu", 2, 2**34, {"bfloat16": 1e12}, 1e11, "measured")
            written = write_run(self.report, run_row(facts, machine, measured))
        return written


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "res-report")


@pytest.fixture
def history(cli_of: CliOf) -> Command:
    run = cli_of(NO_ENGINE)
    return lambda *arguments: run("history", *arguments)


def test_too_few_runs_are_not_judged_and_do_not_fail(runs: Runs, history: Command) -> None:
    runs.add(1000, 1000, 500)
    ended = history(runs.report, "--fail-if-slower", "10%")
    assert (ended.code, "2 comparable runs before it, and at least 3 are needed" in ended.out) == (0, True)


def test_the_table_and_its_limit(runs: Runs, history: Command) -> None:
    runs.add(1000, 1000, 1000, 1100)
    lines = history(runs.report).out.splitlines()
    assert lines[0].split()[:2] == ["started", "(UTC)"]
    assert [line.split()[0] for line in lines[1:5]] == [f"2026-03-0{day}" for day in range(1, 5)]
    assert lines[4].endswith("+10.0%")
    short = history(runs.report, "--limit", 1).out
    assert "2026-03-04 " in short
    assert "2026-03-03 " not in short
    assert "3 older runs are not shown" in short
    assert "10% faster than the median of the 3 comparable runs" in short


def test_json_is_one_object(runs: Runs, history: Command) -> None:
    runs.add(1000, 1000, 1000, 500)
    ended = history(runs.report, "--json", "--limit", 2, "--fail-if-slower", "10%")
    told = json.loads(ended.out)
    assert (ended.code, told["exit_code"], len(told["runs"])) == (65, 65, 2)
    assert "--fail-if-slower allows 10%" in ended.err
    assert told["comparison"]["change"] == pytest.approx(-0.5)
    assert told["runs"][-1]["tokens_per_tflop"] == pytest.approx(500)
    assert told["runs"][-1]["started_at"].startswith("2026-03-04T22:30:00")


def test_runs_of_older_versions_lack_columns(runs: Runs) -> None:
    for _ in range(4):
        path = runs.add(1000)
        old = pq.read_table(path).drop_columns(["forecast_error", "other_cores", "trial"])
        pq.write_table(old, path)
    found = history_of(runs.report)
    assert [run.trial for run in found.runs] == [None] * 4
    assert found.comparison.change == pytest.approx(0)


def test_a_damaged_table_is_named(runs: Runs, history: Command) -> None:
    path = runs.add(1000)
    path.write_bytes(path.read_bytes()[:100])
    ended = history(runs.report)
    assert (ended.code, path.name in ended.err) == (74, True)


@pytest.mark.parametrize("text", ["10", "0%", "100%", "-5%", "ten%", "nan%"])
def test_a_wrong_percentage(text: str) -> None:
    with pytest.raises(UsageError, match="wanted a percentage"):
        share_of(text)


def test_a_percentage() -> None:
    assert (share_of("10%"), share_of(" 2.5 %")) == (0.1, 0.025)


def test_a_job_and_its_result_have_one_history(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_COUNTS_TIME", "1")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", str(LEAST_S))  # counted, and not waited for
    run = cli_of(FAKE)
    job = place.folder / "job.yaml"
    assert run("history", job).code == 66
    assert run("run", job, "-q").code == 0
    told = [json.loads(run("history", name, "--json").out) for name in (job, place.results)]
    assert told[0] == told[1]
    assert [(one["rows"], one["exit_status"]) for one in told[0]["runs"]] == [(20, "published")]
    assert told[0]["comparison"]["run_id"] == told[0]["runs"][0]["run_id"]
    assert told[0]["comparison"]["tokens_per_s"] == pytest.approx(told[0]["runs"][0]["tokens"] / LEAST_S)
    with open_answer(place.results, "SELECT run_id, tokens, computed_requests FROM history", False) as answer:
        (row,) = answer.fetchall()
    assert row[0] == told[0]["runs"][0]["run_id"]
    assert (row[1], row[2]) == (told[0]["runs"][0]["tokens"], 20)
    monkeypatch.chdir(place.folder)
    assert run("history").code == 0
    assert run("history", place.results, "--set", "seed=1").code == 2
