"""A machine for forecasts, and forecasts without the half that most tests ignore."""

from __future__ import annotations

import pytest

from batchinfer.machine.hardware import Hardware
from batchinfer.plan.forecast import job
from batchinfer.plan.forecast.lint import Linter
from tests.batchinfer.plan.forecast.forecasts import machine_of, runs_on


@pytest.fixture
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    found = machine_of(1e10)
    runs_on(monkeypatch, found)
    return found


@pytest.fixture
def whole_plan() -> None:
    """For tests of other quantisations and of lint findings."""


@pytest.fixture(autouse=True)
def _quick_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "whole_plan" not in request.fixturenames:
        monkeypatch.setattr(job, "quantized_forecasts", lambda *_: [])
        monkeypatch.setattr(Linter, "findings", lambda _: [])
