"""A machine for forecasts."""

from __future__ import annotations

import pytest

from batchinfer.machine.hardware import Hardware
from tests.batchinfer.plan.forecast.forecasts import machine_of, runs_on


@pytest.fixture
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    found = machine_of(1e10)
    runs_on(monkeypatch, found)
    return found
