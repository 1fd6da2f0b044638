"""Forecasts of jobs, on machines whose peaks are known."""

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
    """Return what `batchinfer plan` knows of a job, here or on another machine."""
    machine = devices_by_name(hardware) if isinstance(hardware, str) else hardware and devices_of(hardware)
    said: list[str] = [] if notices is None else notices
    return forecast_job(load_job(path, settings), lambda at: None, said.append, machine, sample)


def text(found: JobForecast, price: float | None = None) -> str:
    return "\n".join(forecast_lines(found, price))


def machine_of(peak: float) -> Hardware:
    """Return a machine that reaches this many FLOP/s, and as many bytes a second."""
    return Hardware("a machine", "cpu", 2, 8 << 30, {"float32": peak, "bfloat16": peak}, peak, "measured")


def runs_on(monkeypatch: pytest.MonkeyPatch, machine: Hardware) -> None:
    """Have jobs find this machine, whatever was measured here."""
    monkeypatch.setattr(facts, "detect", lambda device, gpu=None: machine)


def quick_plan(monkeypatch: pytest.MonkeyPatch, *kept: str) -> None:
    """Leave out what takes a forecast most of its time, but for what is `kept`: quantizations, findings."""
    if "quantizations" not in kept:
        monkeypatch.setattr(job, "quantized_forecasts", lambda *_: [])
    if "findings" not in kept:
        monkeypatch.setattr(Linter, "findings", lambda _: [])
