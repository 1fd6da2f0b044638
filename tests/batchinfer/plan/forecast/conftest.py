"""A machine for forecasts, and forecasts without the parts that most tests ignore."""

from __future__ import annotations

import pytest

from batchinfer.machine.hardware import Hardware
from tests.batchinfer.plan.forecast.forecasts import machine_of, quick_plan, runs_on


@pytest.fixture
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    found = machine_of(1e10)
    runs_on(monkeypatch, found)
    return found


@pytest.fixture
def quantizations() -> None:
    pass


@pytest.fixture
def findings() -> None:
    pass


@pytest.fixture(autouse=True)
def _quick_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_plan(monkeypatch, *({"quantizations", "findings"} & {*request.fixturenames}))
