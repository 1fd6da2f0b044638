"""Kills and stops of a run's processes, in real runs of the real engine: the same command then finishes the job, with
the very bytes of a run that nothing disturbed, and leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests import warm_commands
from tests.batchinfer.pipeline.test_orphans import MARK, marked
from tests.batchinfer.test_deterministic_job import published
from tests.batchinfer.wrong_jobs import Place, environment, make_place
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")]
# What a process of a run has on its command line, and how long it lives when nobody else uses the machine
LIVES_S = {
    "batchinfer run": 4.5,
    "render_worker:serve": 1.0,
    "constraint_check:serve": 0.4,
    "workers.worker:main": 3.0,
}
RUN = next(iter(LIVES_S))
COMMAND = ("batchinfer",)
IN_WAVES = ("tests.batchinfer.reading_slowly", "batchinfer")
KILLS = (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM)
ROWS = [
    {
        "id": f"r{n}",
        "text": f"number {n} " * (n % 9),
        **({"choice": [f"yes {n % 6}", "no"]} if n % 5 == 0 else {}),
        **({"temperature": -1.0} if n == 77 else {}),  # the job has an error row, and keeps it
    }
    for n in range(240)
]


@dataclass(frozen=True)
class Disturbance:
    """What happens to the process with `who` on its command line, so long after it is there."""

    who: str
    signum: signal.Signals
    after_s: float
    stopped_s: float = 0.0  # of SIGSTOP
    all_of_them: bool = False  # the whole job is stopped

    def __str__(self) -> str:
        stop = (
            f" for {self.stopped_s:.1f} s{', all of them' if self.all_of_them else ''}"
            if self.stopped_s
            else ""
        )
        return f"{self.signum.name} of {self.who} {self.after_s:.2f} s after its start{stop}"


def disturbances(dice: random.Random, later_s: float = 0.0) -> list[Disturbance]:
    """Four for one run, in the order in which they are due: stops first, as a kill of the command ends it. `later_s`:
    so much longer the command and its engine live."""
    found = []
    for _ in range(4):
        who = dice.choices(list(LIVES_S), weights=(3, 3, 1, 4))[0]
        after_s = dice.uniform(0, LIVES_S[who] + (later_s if LIVES_S[who] > 1 else 0))
        if dice.random() < 0.35:
            found.append(
                Disturbance(who, signal.SIGSTOP, after_s, dice.uniform(0.5, 4.0), dice.random() < 0.5)
            )
        else:
            found.append(Disturbance(who, dice.choice(KILLS), after_s))
    return sorted(found, key=lambda one: (one.who == RUN and not one.stopped_s, list(LIVES_S).index(one.who)))


@dataclass(frozen=True)
class Run:
    """The command in a process of its own, and all that it starts, known by a mark in their environment."""

    process: subprocess.Popen[str]
    mark: str

    def find(self, who: str) -> int | None:
        """The process, as soon as it is there; None: the command ended before."""
        while self.process.poll() is None:
            for pid in marked(self.mark):
                with suppress(FileNotFoundError, ProcessLookupError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if who in line:
                        return pid
            time.sleep(0.01)
        return None

    def suffer(self, what: Disturbance) -> bool:
        """Whether the process was there to be disturbed."""
        pid = self.find(what.who)
        until = time.monotonic() + what.after_s
        while self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if pid is None or pid not in marked(self.mark):
            return False
        whole = marked(self.mark) if what.all_of_them else [pid]
        if not send(what.signum, whole):
            return False
        if what.stopped_s:
            time.sleep(what.stopped_s)
            send(signal.SIGCONT, whole)
        return True


def send(signum: signal.Signals, pids: list[int]) -> bool:
    """Whether one of them was still there."""
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            sent += 1
    return bool(sent)


@contextmanager
def running(folder: Path, command: Sequence[str] = COMMAND) -> Iterator[Run]:
    """The command at work. What outlives it fails the test, and is ended."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-m", *command, "run", "job.yaml", "--quiet"],
        cwd=folder, env=environment(**{MARK: mark, "OMP_NUM_THREADS": "1"}), text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield Run(process, mark)
            deadline = time.monotonic() + PATIENCE_S
            while (left := marked(mark)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == [], "processes outlive the command"
        finally:
            send(signal.SIGKILL, marked(mark))


def ended(run: Run) -> tuple[int, str]:
    """How the command ended, which it is to do by itself, and its last line."""
    _, err = run.process.communicate(timeout=PATIENCE_S)
    return run.process.returncode, err.strip().splitlines()[-1] if err.strip() else ""


def make(folder: Path, model: Path) -> Place:
    place = make_place(folder, model)
    place.rows(*ROWS)
    place.job(
        model="model: {path: model, dtype: bfloat16}",
        sampling="sampling: {max_tokens: 24, temperature: 1.2, from_columns: [choice, temperature]}",
        engine="engine: {deterministic: true, max_num_seqs: 8}",
        commit="commit: {rows: 20, seconds: 0.5}",
    )
    return place


def whole(place: Place) -> None:
    """Run the command to its end, which nothing disturbs."""
    command = [sys.executable, "-m", *COMMAND, "run", "job.yaml", "--quiet"]
    done = warm_commands.run(command, cwd=place.folder, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> tuple[Path, list[str]]:
    """A checkpoint, and what the job publishes when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    make_model_folder(folder / "model", dtype=torch.bfloat16, seed=2)
    place = make(folder / "job", folder / "model")
    whole(place)
    errors = [row["custom_id"] for row in place.table() if row["status"] != "ok"]
    assert errors == ["r77"]
    return folder / "model", published(place)


def disturb(place: Place, seed: int, command: Sequence[str] = COMMAND, later_s: float = 0.0) -> None:
    """Run the command with four disturbances, and once more if it failed."""
    told = [f"seed {seed}:"]
    with running(place.folder, command) as run:
        for what in disturbances(random.Random(seed), later_s):
            told.append(f"{what}: {'done' if run.suffer(what) else 'too late'}")
        code, last = ended(run)
    told.append(f"exit {code} {last}")
    print("\n  ".join(told))
    if code != 0:
        whole(place)


# 20 kills what checks, the engine at work, and the command, which has rows left to go on with
@pytest.mark.parametrize("seed", first_of([20, *(seed for seed in range(40) if seed != 20)], 1))
def test_kills_and_stops_change_no_byte(
    seed: int, tmp_path: Path, undisturbed: tuple[Path, list[str]]
) -> None:
    """Four a seed, of the command itself, of what renders and checks, and of the engine."""
    model, expected = undisturbed
    place = make(tmp_path / "job", model)
    disturb(place, seed)
    assert published(place) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_kills_between_waves_change_no_byte(
    seed: int, tmp_path: Path, undisturbed: tuple[Path, list[str]]
) -> None:
    """Rows run while others are read; what is published is what one plan publishes."""
    model, expected = undisturbed
    place = make(tmp_path / "job", model)
    disturb(place, seed, IN_WAVES, later_s=8.0)
    assert published(place) == expected
    (report,) = sorted((place.folder / "out").glob("*-report/run-*.parquet"))[-1:]
    print(pq.read_table(report).select(["waves", "computed_requests", "reused_requests"]).to_pylist())
