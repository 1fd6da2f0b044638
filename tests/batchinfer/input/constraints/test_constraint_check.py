"""Tests that the driver survives any end of the process that compiles constraints.

A constraint is refused after it ended a second process that compiled nothing else.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from batchinfer.core.errors import Unavailable
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints import constraint_check
from batchinfer.input.constraints.constraint_check import ConstraintChecker

CHOICE = SamplingParams(choice=("yes", "no"))


def ended(monkeypatch: pytest.MonkeyPatch, folder: Path, most: int, by: signal.Signals) -> None:
    task = "tests.batchinfer.child_tasks:check_constraints_and_be_ended"
    monkeypatch.setattr(constraint_check, "_ENTRY", task)
    monkeypatch.setenv("LIMITED_STARTS", str(folder / "starts"))
    monkeypatch.setenv("ENDED_MOST", str(most))
    monkeypatch.setenv("ENDED_BY", str(int(by)))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGABRT])
def test_one_kill_is_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals) -> None:
    ended(monkeypatch, tmp_path, 1, by)
    with ConstraintChecker(None) as checker:
        assert checker.problem(CHOICE) is None
        assert checker.problem(SamplingParams(regex="(")) is not None


def test_a_constraint_that_ends_two_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, tmp_path, 2, signal.SIGKILL)
    with ConstraintChecker(None) as checker:
        problem = checker.problem(CHOICE)
        assert "the process that compiled it ended, twice" in problem
        assert checker.problem(CHOICE) is None


def test_a_silent_process_refuses_no_constraint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped, or the machine was busy."""
    ended(monkeypatch, tmp_path, 2, signal.SIGSTOP)
    monkeypatch.setattr(constraint_check, "_WAIT_S", 0.5)
    with ConstraintChecker(None) as checker:
        with pytest.raises(Unavailable, match=r"has not answered for 0\.5 s; run the same command again"):
            checker.problem(CHOICE)
        assert checker.problem(CHOICE) is None
