"""How much CPU time tests take: what a run of them may take on two cores is kept by those who see it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

NAME = "cpu_s"  # among a report's properties, in which it also comes from another process
MUCH_S = 8.0  # of which a test that is no sweep should need less


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def noted_s(report: pytest.TestReport) -> float:
    """Return the CPU time that a report tells of, in seconds; 0 if it tells of none."""
    return sum(float(value) for name, value in report.user_properties if name == NAME)


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return what is said of a run: its CPU time, and the tests that took much of it, the longest first."""
    taken = {report.nodeid: noted_s(report) for report in reports if report.when == "call"}
    longest = sorted(taken, key=lambda node: -taken[node])
    much = [f"  {taken[node]:.0f} s  {node}" for node in longest if taken[node] > MUCH_S]
    told = f"Tests took {sum(taken.values()):,.0f} s of CPU time."
    return [told, f"More than {MUCH_S:.0f} s each:", *much] if much else [told]
