"""Kills and stops processes of real runs: the same command then finishes with an undisturbed run's bytes.

No process remains.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests import warm_commands
from tests.batchinfer.marked_commands import MarkedCommand, send, started
from tests.batchinfer.test_deterministic_job import published
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")]
# Part of a process's command line, and its lifetime in seconds on an idle machine
LIVES_S = {
    "batchinfer run": 4.5,
    "render_worker:serve": 1.0,
    "constraint_check:serve": 0.4,
    "workers.worker:main": 3.0,
}
RUN = next(iter(LIVES_S))
OF_RANKS_S = {RUN: 4.5, "ranks.process:main": 3.0, "workers.worker:main": 3.0}
# Ranks that divide layers do not promise the bits of one process
GREEDY = (
    "--set", "engine.deterministic=false", "--set", "model.dtype=float32", "--set", "sampling.temperature=0",
)  # fmt: skip
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
    """A signal to the process with `who` on its command line, `after_s` seconds after its start."""

    who: str
    signum: signal.Signals
    after_s: float
    stopped_s: float = 0.0  # of SIGSTOP
    all_of_them: bool = False  # the whole job is stopped


def disturbances(dice: random.Random, lives_s: dict[str, float], later_s: float) -> list[Disturbance]:
    """Draw four disturbances of a run by due time, stops first, as a kill of the command ends the run.

    Args:
        lives_s: lifetimes of processes in seconds, by a part of their command lines.
        later_s: additional lifetime of the command and its engine, in seconds.
    """
    found = []
    for _ in range(4):
        who = dice.choices(list(lives_s), weights=(3, 3, 1, 4)[: len(lives_s)])[0]
        after_s = dice.uniform(0, lives_s[who] + (later_s if lives_s[who] > 1 else 0))
        if dice.random() < 0.35:
            found.append(
                Disturbance(who, signal.SIGSTOP, after_s, dice.uniform(0.5, 4.0), dice.random() < 0.5)
            )
        else:
            found.append(Disturbance(who, dice.choice(KILLS), after_s))
    return sorted(found, key=lambda one: (one.who == RUN and not one.stopped_s, list(lives_s).index(one.who)))


def suffers(command: MarkedCommand, what: Disturbance) -> bool:
    """Disturb a process of the command; return True if the process existed."""
    pids = list[int]()
    while not pids and command.process.poll() is None:
        pids = command.pids(what.who.encode())
        time.sleep(0.01)
    until = time.monotonic() + what.after_s
    while command.process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    all_of_them = command.pids()
    whole = all_of_them if what.all_of_them else pids[:1]
    if not pids or pids[0] not in all_of_them or not send(what.signum, whole):
        return False
    if what.stopped_s:
        time.sleep(what.stopped_s)
        send(signal.SIGCONT, whole)
    return True


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


def whole(place: Place, words: Sequence[str] = ()) -> None:
    """Run the command to its end without disturbances."""
    command = [sys.executable, "-m", *COMMAND, "run", "job.yaml", "--quiet", *words]
    done = warm_commands.run(command, cwd=place.folder, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> tuple[Path, list[str]]:
    """A checkpoint, and the published bytes of an undisturbed job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    make_model_folder(folder / "model", dtype=torch.bfloat16, seed=2)
    place = make(folder / "job", folder / "model")
    whole(place)
    errors = [row["custom_id"] for row in place.table() if row["status"] != "ok"]
    assert errors == ["r77"]
    return folder / "model", published(place)


def disturb(
    place: Place,
    seed: int,
    command: Sequence[str] = COMMAND,
    later_s: float = 0.0,
    lives_s: dict[str, float] = LIVES_S,
    words: Sequence[str] = (),
) -> None:
    """Run the command with four disturbances, and run it again if it failed."""
    told = [f"seed {seed}:"]
    with started(place.folder, [*command, "run", "job.yaml", "--quiet", *words], OMP_NUM_THREADS="1") as run:
        for what in disturbances(random.Random(seed), lives_s, later_s):
            told.append(f"{what}: {'done' if suffers(run, what) else 'too late'}")
    code = run.process.returncode
    print("\n  ".join([*told, f"exit {code} {run.said.read_text()[-200:]}"]))
    if code != 0:
        whole(place, words)


@pytest.mark.parametrize("seed", first_of([20, *(seed for seed in range(40) if seed != 20)], 1))
def test_kills_and_stops_change_no_byte(
    seed: int, tmp_path: Path, undisturbed: tuple[Path, list[str]]
) -> None:
    """Four per seed: of the command, of processes that render and check, and of the engine."""
    model, expected = undisturbed
    place = make(tmp_path / "job", model)
    disturb(place, seed)
    assert published(place) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_kills_between_waves_change_no_byte(
    seed: int, tmp_path: Path, undisturbed: tuple[Path, list[str]]
) -> None:
    """Rows run while others are read; the result equals a single plan's."""
    model, expected = undisturbed
    place = make(tmp_path / "job", model)
    disturb(place, seed, IN_WAVES, later_s=8.0)
    assert published(place) == expected
    (report,) = sorted((place.folder / "out").glob("*-report/run-*.parquet"))[-1:]
    print(pq.read_table(report).select(["waves", "computed_requests", "reused_requests"]).to_pylist())


@pytest.fixture(scope="module")
def greedy(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: tuple[Path, list[str]]
) -> tuple[Path, list[str]]:
    """The checkpoint, and the published bytes of the greedy job."""
    place = make(tmp_path_factory.mktemp("greedy") / "job", undisturbed[0])
    whole(place, GREEDY)
    return undisturbed[0], published(place)


@pytest.mark.slow
@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("seed", range(12))
def test_kills_and_stops_of_ranks_change_no_byte(
    seed: int, division: str, tmp_path: Path, greedy: tuple[Path, list[str]]
) -> None:
    model, expected = greedy
    place = make(tmp_path / "job", model)
    disturb(place, seed, lives_s=OF_RANKS_S, words=(*GREEDY, "--set", f"engine.{division}=2"))
    assert published(place) == expected
