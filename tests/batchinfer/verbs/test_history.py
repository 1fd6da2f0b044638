"""`batchinfer history`: which runs are compared, and when a run counts as slower."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer import cli
from batchinfer.core.errors import UsageError
from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline import options
from batchinfer.report import history as report_history
from batchinfer.report.history import LEAST_S, Comparison
from batchinfer.report.tables.columns.declared import RUN
from batchinfer.report.tables.folder import new_run_id, table_path, tables
from batchinfer.report.tables.meter import Measured
from batchinfer.report.tables.tables import run_row, write_run
from batchinfer.verbs.history import history_of, share_of
from batchinfer.verbs.query import asked
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, CliOf, Command, Place, make_place
from tests.examples import first_of

START = datetime(2026, 3, 1, 22, 30, tzinfo=UTC)


class Runs:
    """Writes run tables as runs do, one a night."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.nights = 0

    def add(
        self,
        speed: float,
        *,
        engine_s: float = 60.0,
        output_share: float = 0.5,
        peak: float | None = 1e12,
        **facts: Any,
    ) -> str:
        """A run that computed so many tokens a second for `engine_s` seconds."""
        started = START + timedelta(days=self.nights)
        self.nights += 1
        tokens = round(speed * engine_s)
        output = round(tokens * output_share)
        known = {"model": "org/m@c", "dtype": "bfloat16", "quantization": "none", "trial": False}
        known |= {"exit_code": 0, "exit_status": "published"}
        name = facts.pop("hardware", "Test CPU")
        given = {
            "run_id": new_run_id(started), "job": "orders", "output": "/d/res", "started_at": started,
            "finished_at": started + timedelta(seconds=engine_s + 5),
            "deterministic": False, "rows": 100, "engine_s": engine_s, "forecast_s": engine_s / 2,
        } | known | facts  # fmt: skip
        machine = Hardware(
            name, "cpu", 2, 2**34, {given["dtype"] or "": peak} if peak else {}, 1e11, "measured"
        )
        row = run_row(given, machine, measured(tokens - output, output, engine_s))
        write_run(self.report, row)
        return str(given["run_id"])

    def compared(self) -> Comparison:
        return history_of(self.report).comparison


def measured(prompt: int, output: int, wall_s: float) -> Measured:
    return {
        "steps": 10, "computed_requests": 100, "prompt_tokens_run": prompt, "output_tokens": output,
        "engine_wall_s": wall_s,
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "res-report")


@pytest.fixture
def history(cli_of: CliOf) -> Command:
    run = cli_of(NO_ENGINE)
    return lambda *arguments: run("history", *arguments)


@pytest.mark.parametrize("seed", first_of(range(20), 3))
@pytest.mark.parametrize(("newest", "code"), [(1.0, 0), (1 / 1.25, 65)])
def test_noise_does_not_fail_and_a_slowdown_does(
    seed: int, newest: float, code: int, runs: Runs, history: Command
) -> None:
    """±5 % from night to night; then a run that took its usual time, or 25 % longer."""
    noise = random.Random(seed)
    nights = noise.randint(4, 13)
    for _ in range(nights):
        runs.add(1000 * noise.uniform(0.95, 1.05))
    runs.add(1000 * newest * noise.uniform(0.95, 1.05))
    ended = history(runs.report, "--fail-if-slower", "10%")
    assert ended.code == code, f"seed {seed}: {ended.out}"
    assert ("--fail-if-slower allows 10%" in ended.err) == (code == 65)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("changes", "reason"), [
    ({"trial": True}, "a trial"),
    ({"engine_s": LEAST_S / 2}, "computed for less than 5 s"),
    ({"speed": 0.0}, "computed nothing"),
    ({"exit_status": "interrupted", "exit_code": 143}, "did not finish"),
    ({"dtype": "float32"}, "another dtype"),
    ({"quantization": "int8"}, "another quantization"),
    ({"model": "org/m@d"}, "another model"),
    ({"engine_s": 600.0}, "over 4 times more or less work"),
    ({"output_share": 0.2}, "another mixture of prompt and output tokens"),
    ({"output_share": 0.0}, "another mixture of prompt and output tokens"),
    ({"hardware": "Other CPU", "peak": None}, "another machine, and the peak of one is unknown"),
])  # fmt: skip
def test_what_cannot_be_compared_is_left_out_and_named(
    changes: dict[str, Any], reason: str, runs: Runs, history: Command
) -> None:
    for _ in range(3):
        runs.add(1000)
    runs.add(**({"speed": 3000.0} | changes))
    runs.add(1000)
    found = runs.compared()
    assert (found.before, found.change) == (3, pytest.approx(0, abs=1e-3))
    assert found.left_out == {reason: 1}
    assert f"not compared: 1 ({reason})" in history(runs.report).out


def test_the_newest_run_that_computed_enough_is_judged(runs: Runs) -> None:
    for _ in range(4):
        runs.add(1000)
    slow = runs.add(700)
    runs.add(5000, trial=True)
    runs.add(10, engine_s=0.5)
    found = runs.compared()
    assert (found.run_id, found.slower_than(0.1)) == (slow, True)


def test_another_machine_is_compared_by_its_peak(runs: Runs) -> None:
    for _ in range(4):
        runs.add(1000, peak=1e12)
    runs.add(1900, hardware="Twice as fast", peak=2e12, engine_s=60)
    assert runs.compared().change == pytest.approx(-0.05)


def test_a_peak_that_was_measured_again_is_no_change_of_speed(runs: Runs) -> None:
    for _ in range(4):
        runs.add(1000, peak=1e12)
    runs.add(1000, peak=1.3e12)
    assert runs.compared().change == pytest.approx(0)


def test_speed_is_judged_by_the_last_runs(runs: Runs) -> None:
    """What was lost long ago does not fail every night from then on."""
    for speed in [2000] * 12 + [1000] * 10:
        runs.add(speed)
    runs.add(990)
    assert not runs.compared().slower_than(0.1)


def test_too_few_runs_are_not_judged_and_do_not_fail(runs: Runs, history: Command) -> None:
    for speed in (1000, 1000, 500):
        runs.add(speed)
    ended = history(runs.report, "--fail-if-slower", "10%")
    assert (ended.code, "2 comparable runs before it, and at least 3 are needed" in ended.out) == (0, True)


def test_the_table_and_its_limit(runs: Runs, history: Command) -> None:
    for speed in (1000, 1000, 1000, 1100):
        runs.add(speed)
    lines = history(runs.report).out.splitlines()
    assert lines[0].split()[:2] == ["started", "(UTC)"]
    assert [line.split()[0] for line in lines[1:5]] == [
        "2026-03-01",
        "2026-03-02",
        "2026-03-03",
        "2026-03-04",
    ]
    assert lines[4].endswith("+10.0%")
    short = history(runs.report, "--limit", 1).out
    assert "2026-03-04 " in short
    assert "2026-03-03 " not in short
    assert "3 older runs are not shown" in short
    assert "10% faster than the median of the 3 comparable runs" in short


def test_json_is_one_object(runs: Runs, history: Command) -> None:
    for speed in (1000, 1000, 1000, 500):
        runs.add(speed)
    ended = history(runs.report, "--json", "--limit", 2, "--fail-if-slower", "10%")
    told = json.loads(ended.out)
    assert (ended.code, told["exit_code"], len(told["runs"])) == (65, 65, 2)
    assert told["comparison"]["change"] == pytest.approx(-0.5)
    assert told["runs"][-1]["tokens_per_tflop"] == pytest.approx(500)
    assert told["runs"][-1]["started_at"].startswith("2026-03-04T22:30:00")


def test_runs_of_older_versions_lack_columns(runs: Runs) -> None:
    for _ in range(4):
        name = runs.add(1000)
        path = table_path(runs.report, "run", name)
        old = pq.read_table(path).drop_columns(["forecast_error", "other_cores", "trial"])
        pq.write_table(old, path)
    assert [run.trial for run in history_of(runs.report).runs] == [None] * 4
    assert runs.compared().change == pytest.approx(0)


def test_a_damaged_table_is_named(runs: Runs, history: Command) -> None:
    path = table_path(runs.report, "run", runs.add(1000))
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
    monkeypatch.setenv("FAKE_ENGINE_COUNTS_TIME", "1")  # without a delay: no time at all, on any machine
    run = cli_of(FAKE)
    job = place.folder / "job.yaml"
    assert run("history", job).code == 66
    assert run("run", job, "-q").code == 0
    told = [json.loads(run("history", name, "--json").out) for name in (job, place.results)]
    assert told[0] == told[1]
    assert [(one["rows"], one["exit_status"]) for one in told[0]["runs"]] == [(20, "published")]
    assert told[0]["comparison"]["run_id"] is None  # that is no measurement
    with asked(place.results, "SELECT run_id, tokens, computed_requests FROM history", False) as answer:
        (row,) = answer.fetchall()
    assert row[0] == told[0]["runs"][0]["run_id"]
    assert (row[1], row[2]) == (told[0]["runs"][0]["tokens"], 20)
    monkeypatch.chdir(place.folder)
    assert run("history").code == 0
    assert run("history", place.results, "--set", "seed=1").code == 2


STEP_S, STEPS = 0.1, 8


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    """A job that has run four times."""
    place = make_place(tmp_path_factory.mktemp("nights") / "job", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "RunOptions", partial(options.RunOptions, engine=FAKE))
        for night in range(4):
            assert whole_run(place, patch, STEP_S, f"night {night}") == 0
    return place


def whole_run(place: Place, patch: pytest.MonkeyPatch, step_s: float, words: str) -> int:
    """Run the job on rows that it has not had before, all equally long, with steps of that length."""
    texts = (sha256(f"{words} {i}".encode()).hexdigest() for i in range(2 * STEPS))
    place.rows(*({"id": f"r{i:02}", "text": text} for i, text in enumerate(texts)))
    patch.setenv("FAKE_ENGINE_BATCH", "2")
    patch.setenv("FAKE_ENGINE_DELAY_S", str(step_s))
    patch.setenv("FAKE_ENGINE_COUNTS_TIME", "1")  # whatever else the machine does
    return cli._guarded(["run", str(place.folder / "job.yaml"), "-q"])


@pytest.mark.slow
@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.25, 65)])
def test_whole_runs_fail_where_the_engine_is_slower(
    slower: float, code: int, nights: Place, history: Command, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_history, "LEAST_S", STEPS * STEP_S / 2)
    run = cli_of(FAKE)
    report = nights.results.with_name("res-report")
    before = set(tables(report, RUN))
    assert whole_run(nights, monkeypatch, slower * STEP_S, f"slower by {slower:.2f}") == 0
    (made,) = set(tables(report, RUN)) - before
    ended = run("history", nights.folder / "job.yaml", "--fail-if-slower", "10%")
    assert ended.code == code, ended.out
    assert "median of the 4 comparable runs" in ended.out
    made.unlink()  # the next one is compared with the same nights
