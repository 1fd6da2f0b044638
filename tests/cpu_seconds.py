"""Measures the CPU time of tests, reports the longest, and records the durations of all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

NAME = "cpu_s"  # among a report's properties, in which it also comes from another process
MUCH_S = 8.0  # a test that is no sweep should need less
RECORD = "BATCHINFER_TEST_DURATIONS"  # the file of the record; `make test` sets it


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def noted_s(report: pytest.TestReport) -> float:
    """Return the CPU time of a report in seconds, or 0 if it has none."""
    return sum(float(value) for name, value in report.user_properties if name == NAME)


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return lines with the CPU time of a run and of its longest tests."""
    taken = {report.nodeid: noted_s(report) for report in reports if report.when == "call"}
    longest = sorted(taken, key=lambda node: -taken[node])
    much = [f"  {taken[node]:.0f} s  {node}" for node in longest if taken[node] > MUCH_S]
    total = f"Tests took {sum(taken.values()):,.0f} s of CPU time."
    return [total, f"More than {MUCH_S:.0f} s each:", *much] if much else [total]


def record(reports: Iterable[pytest.TestReport], path: Path) -> None:
    """Write {test: {"wall_s", "cpu_s"}} as JSON, the longest test first. Wall time includes set-up and
    teardown."""
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for report in reports:
        wall[report.nodeid] = wall.get(report.nodeid, 0.0) + report.duration
        cpu[report.nodeid] = max(cpu.get(report.nodeid, 0.0), noted_s(report))
    durations = {
        node: {"wall_s": round(wall[node], 3), "cpu_s": round(cpu[node], 3)}
        for node in sorted(wall, key=lambda node: -wall[node])
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(durations, indent=1) + "\n")
