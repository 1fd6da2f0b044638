"""`plan` forecasts the duration of a calibration for the first run of a job, and none for later runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer import cli
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline.options import RunOptions
from batchinfer.plan.forecast.calibration import CalibrationSample, calibration_forecast
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.setup.job_setup import check_setup
from tests.batchinfer.int4_jobs import INT4, PLAIN, ROWS, make_divisible
from tests.batchinfer.pipeline.test_pipeline import run, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, runs_on, text

PEAK = 1e8  # FLOP/s of a slow machine: a tiny model takes noticeable time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_divisible(tmp_path_factory.mktemp("model"))


def machine() -> Hardware:
    found = machine_of(PEAK)
    return replace(found, peak_flops={**found.peak_flops, "int8": PEAK})


def test_plan_has_a_first_calibration(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, machine())
    job = write_job(tmp_path, model, ROWS, **PLAIN, deadline="06:00")
    found = planned(job, *INT4)
    calibrating, engine = found.calibration.seconds, found.forecast.seconds
    assert calibrating > 4
    assert found.deadline.engine_s == pytest.approx(calibrating + engine)
    assert found.calibration.rows == len(ROWS)
    assert "int4      about " in text(found)
    assert forecast_json(found, None)["calibration"]["seconds"] == calibrating
    assert planned(job, *INT4, ("model.calibration", "off")).calibration is None
    assert planned(job, ("model.dtype", "float32")).calibration is None
    assert run(job, RunOptions(limit=3), *INT4).exit_code == 0
    assert planned(job, *INT4).calibration is None


def test_the_command_says_why_nothing_is_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_on(monkeypatch, replace(machine(), peak_flops={}, bandwidth=None, source="unknown"))
    job = write_job(tmp_path, model, ROWS, **PLAIN)
    command = ["plan", str(job), *(part for key, value in INT4 for part in ("--set", f"{key}={value}"))]
    assert cli._guarded(command) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("int4 "))
    assert "how long it takes is not known: run `batchinfer doctor --measure`" in said
    assert cli._guarded([*command, "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)["calibration"]
    assert calibration["seconds"] is None
    assert calibration["rows"] == len(ROWS)


def test_more_tokens_layers_and_slower_machines_take_longer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(write_job(tmp_path, model, ROWS, **PLAIN), INT4)

    def seconds(sample: CalibrationSample, peak: float = PEAK) -> float:
        runs_on(monkeypatch, replace(machine_of(peak), peak_flops={"float32": peak, "int8": peak}))
        setup = check_setup(job, state_of(job), this_machine(job.engine.device))
        found = calibration_forecast(setup, sample).seconds
        return found

    usual = seconds(CalibrationSample(20, 2000, 64))
    assert seconds(CalibrationSample(20, 2000, 0)) < usual < seconds(CalibrationSample(40, 4000, 64))
    assert seconds(CalibrationSample(20, 2000, 64), PEAK / 10) == pytest.approx(10 * usual, rel=0.5)
