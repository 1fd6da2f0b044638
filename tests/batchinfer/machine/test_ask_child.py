"""A question to a child process is repeated if the process died for an unknown reason."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.machine.ask_child import ChildDied, ask_child

TASKS = "tests.batchinfer.child_tasks"


@pytest.fixture(autouse=True)
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMITED_STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("ENDED_BY", str(int(signal.SIGKILL)))


def test_one_kill_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDED_MOST", "1")
    assert ask_child("it", f"{TASKS}:answer_once_others_ended", within_s=60) == "answered"


def test_two_kills_are_reported_as_out_of_memory_without_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDED_MOST", "2")
    with pytest.raises(OutOfMemory, match=r"it was killed \(signal 9, SIGKILL\), most likely"):
        ask_child("it", f"{TASKS}:answer_once_others_ended", within_s=60)


def test_two_crashes_blame_the_question() -> None:
    with pytest.raises(ChildDied, match="exit status 3"):
        ask_child("it", f"{TASKS}:end", "3", within_s=60)


def test_a_silent_child_blames_nothing() -> None:
    with pytest.raises(Unavailable, match=r"it has not answered for 0 s; run the same command again"):
        ask_child("it", f"{TASKS}:sleep", within_s=0.3)
