"""Tests calibration with real steps of real engines, with smaller and fewer models."""

from __future__ import annotations

import pytest

from batchinfer.engine.load import calibration
from batchinfer.engine.load.calibration import calibrate


def test_steps_and_the_host_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_WIDE", calibration._shape(128, 256, 2, 1, 1, 512))
    monkeypatch.setattr(calibration, "_NARROW", calibration._shape(64, 128, 2, 1, 2, 2_048))
    monkeypatch.setattr(calibration, "MIN_TOTAL_S", 0.0)
    monkeypatch.setattr(calibration, "HOST_RUNS", ((6, 3), (2, 4)))
    steps = [*calibration._steps()][::3]
    monkeypatch.setattr(calibration, "_steps", lambda: steps)
    found = calibrate("float32", "none")
    assert len(found.steps) == 2 * len(steps)
    assert len({cost.layers for cost, *_ in found.steps}) == 2
    for cost, shape, rows, seconds in found.steps:
        assert seconds > 0
        assert 0 < shape.sampled <= rows <= shape.tokens
        assert shape.kv_tokens <= shape.pairs
        assert shape.kv_tokens >= rows * cost.layers, "sequences share no blocks"
    assert [rows for rows, _ in found.host] == [6, 6, 6, 2, 2, 2, 2]
    assert all(seconds > 0 for _, seconds in found.host)
