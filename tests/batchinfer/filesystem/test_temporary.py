"""Tests that a temporary folder is removed with its process, or by the next command, and other folders stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from batchinfer.filesystem.temporary import temporary_folder
from tests.batchinfer.wrong_jobs import environment
from tests.patience import PATIENCE_S

HOLDS = """
import sys
from batchinfer.filesystem.temporary import temporary_folder
with temporary_folder("plan") as folder:
    open(folder + "/index", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""
LONG_AGO = 1_000_000_000


def holding() -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", HOLDS], subprocess.PIPE
    return subprocess.Popen(command, env=environment(), text=True, stdin=pipe, stdout=pipe)


def folder_of(process: subprocess.Popen[str]) -> Path:
    """Return the folder once it exists, and make it old."""
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    with holding() as lives, holding() as dies:
        used, left = folder_of(lives), folder_of(dies)
        dies.send_signal(signal.SIGKILL)
        dies.wait(PATIENCE_S)
        others = [temporary / name for name in ("batchinfer-plan-archives", "batchinfer-plan-x.tmp", "tmpa")]
        for other in others:
            other.mkdir()
            os.utime(other, (LONG_AGO, LONG_AGO))
        with temporary_folder("query") as folder:
            assert {*temporary.iterdir()} == {used, Path(folder), *others}
        assert not left.exists()
        lives.communicate(timeout=PATIENCE_S)
    assert {*temporary.iterdir()} == {*others}


def test_a_folder_is_removed_after_an_exception(temporary: Path) -> None:
    def work() -> None:
        with temporary_folder("diff") as folder:
            (Path(folder) / "spill").mkdir()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        work()
    assert not list(temporary.iterdir())
