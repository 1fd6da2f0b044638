"""Kills, stops and starves ranks at random moments, and kills, stops and ends their command.

`pytest -s -m slow tests/batchinfer/test_lost_ranks.py` prints a line per case; LOST_RANKS_SEED draws other
moments.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.hasty_run import SILENT_S
from tests.batchinfer.killed_runs import published
from tests.batchinfer.marked_commands import MarkedCommand, started
from tests.batchinfer.pipeline.test_pipeline import run
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, STAGES, TENSOR, job
from tests.checkpoints import make_model_folder
from tests.examples import everything
from tests.settings import has_cores

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
    pytest.mark.skipif(
        len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
    ),
]
ENGINE, RANK = b"workers.worker:main", b"workers.ranks.process:main"  # in the command line of a process
SEED = os.environ.get("LOST_RANKS_SEED", "0")
DIVISIONS: tuple[dict[str, int], ...] = (
    {TENSOR: 2}, {STAGES: 2}, {EXPERTS: 2}, {TENSOR: 4}, {STAGES: 4}, {TENSOR: 2, STAGES: 2},
)  # fmt: skip
WHAT = ("SIGKILL", "memory", "SIGSTOP")
WHO = ("a rank", "the command", "rank 0", "a rank")
ALL = [  # 72
    (division, who, "SIGTERM" if (who, what) == ("the command", "memory") else what)
    for what in WHAT for who in WHO for division in DIVISIONS
]  # fmt: skip
assert len(ALL) >= 60


@dataclass(frozen=True)
class Undisturbed:
    """A run of one process without disturbances."""

    model: Path
    files: list[bytes]
    took_s: float  # the whole run


def victims(command: MarkedCommand, who: str, ranks: int) -> list[int]:
    """Return the processes to strike, once all of them exist."""
    if who == "the command":
        return [command.process.pid]
    kind, count = (ENGINE, 1) if who == "rank 0" else (RANK, ranks - 1)
    found = command.pids(kind)
    return found if len(found) == count else []


def strikes(
    command: MarkedCommand, who: str, ranks: int, after_s: float, what: str, chance: random.Random
) -> bool:
    """Disturb one process `after_s` seconds after it started; return True if the command was still running."""
    while not (found := victims(command, who, ranks)):
        if command.process.poll() is not None:
            return False
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        command.process.wait(after_s)
        return False
    with suppress(ProcessLookupError):
        strike(chance.choice(found), what)
    return True


def strike(pid: int, what: str) -> None:
    """Kill a process, stop it for longer than the watchdog allows, or take its memory."""
    if what == "memory":
        resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))
        return
    os.kill(pid, getattr(signal, what))
    if what == "SIGSTOP":
        time.sleep(2 * SILENT_S)  # one that loads may take its time, and goes on
        os.kill(pid, signal.SIGCONT)


def running(path: Path, division: dict[str, int]) -> AbstractContextManager[MarkedCommand]:
    """Start the command, and check at the end that no process remains."""
    sets = (FLOAT32, *((name, str(size)) for name, size in division.items()))
    arguments = [part for name, value in sets for part in ("--set", f"{name}={value}")]
    return started(path.parent, ["tests.batchinfer.hasty_run", str(path), *arguments])


def run_whole(path: Path, division: dict[str, int]) -> None:
    """Run the job in this process, which is faster, or as a command in `make test-all`."""
    if everything():
        with running(path, division) as command:
            pass
        assert command.process.returncode == 0, command.said.read_text()
        return
    with pytest.MonkeyPatch.context() as patch:
        has_cores(patch, 4)
        sets = FLOAT32, *((name, str(size)) for name, size in division.items())
        assert run(path, RunOptions(), *sets).exit_code == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> Undisturbed:
    """The answers of one process, and its duration."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_hidden_layers": 4}
    make_model_folder(folder / "model", "mixtral", **sizes)
    path, began = job(folder / "job", folder / "model"), time.perf_counter()
    run_whole(path, {})
    return Undisturbed(folder / "model", published(path), time.perf_counter() - began)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ALL)))
def test_a_lost_process_changes_no_byte(tmp_path: Path, undisturbed: Undisturbed, number: int) -> None:
    """The command recovers from all losses except its own, and from lost memory while an engine loads: then
    the same command resumes. (Without memory it may not end: Python waits for a thread that could not start.)
    No process remains."""
    division, who, what = ALL[number]
    chance = random.Random(f"{SEED} {number}")
    share, ranks = chance.random(), 1
    for size in division.values():
        ranks *= size
    for turn in range(20):
        after_s = share * undisturbed.took_s / 1.3**turn
        path = job(tmp_path / f"job {turn}", undisturbed.model)
        with running(path, division) as command:
            struck = strikes(command, who, ranks, after_s, what, chance)
        code = command.process.returncode
        print(
            f"seed {SEED}, case {number}: {division}, {who}, {what} after {after_s:.2f} s: {struck=}, exit code {code}"
        )
        if struck:
            break
    assert struck, "it ended before it could be struck"
    if who == "the command" and what != "SIGSTOP":
        assert code != 0
    elif code != 0:
        assert what == "memory", command.said.read_text()
    if code != 0:
        run_whole(path, division)
    assert published(path) == undisturbed.files
