"""A machine for forecasts, and forecasts without what takes half of their time and most tests do not look at."""

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
    """For tests of the quantisations that a job could have, and of what keeps its rows from sharing work."""


@pytest.fixture(autouse=True)
def _quick_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "whole_plan" not in request.fixturenames:
        monkeypatch.setattr(job, "quantized_forecasts", lambda *_: [])
        monkeypatch.setattr(Linter, "findings", lambda _: [])
