"""Forecasts of jobs on machines with known peaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.job import load_job
from batchinfer.machine import facts
from batchinfer.machine.devices import devices_by_name, devices_of
from batchinfer.machine.hardware import Hardware
from batchinfer.plan.forecast import job
from batchinfer.plan.forecast.job import JobForecast, forecast_job
from batchinfer.plan.forecast.lint import Linter
from batchinfer.plan.forecast.text import forecast_lines


def planned(
    path: Path,
    *settings: tuple[str, str],
    notices: list[str] | None = None,
    hardware: Hardware | str | None = None,
    sample: int | None = None,
) -> JobForecast:
    """Return the forecast of `batchinfer plan` for this machine or another one."""
    machine = devices_by_name(hardware) if isinstance(hardware, str) else hardware and devices_of(hardware)
    said: list[str] = [] if notices is None else notices
    return forecast_job(load_job(path, settings), lambda at: None, said.append, machine, sample)


def text(found: JobForecast, price: float | None = None) -> str:
    return "\n".join(forecast_lines(found, price))


def machine_of(peak: float) -> Hardware:
    """Return a machine with this peak in FLOP/s and in bytes/s."""
    return Hardware("a machine", "cpu", 2, 8 << 30, {"float32": peak, "bfloat16": peak}, peak, "measured")


def runs_on(monkeypatch: pytest.MonkeyPatch, machine: Hardware) -> None:
    """Make jobs find this machine instead of the real one."""
    monkeypatch.setattr(facts, "detect", lambda device, gpu=None: machine)


def quick_plan(monkeypatch: pytest.MonkeyPatch, *kept: str) -> None:
    """Skip the slow parts of a forecast except `kept`: "quantizations", "findings"."""
    if "quantizations" not in kept:
        monkeypatch.setattr(job, "quantized_forecasts", lambda *_: [])
    if "findings" not in kept:
        monkeypatch.setattr(Linter, "findings", lambda _: [])
