"""Whole jobs of many short rows, whose engine is the tests' fake one.

The tokenizer is the quickstart's. Memory is that of all processes of a run together, each page counted once (Pss).
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import psutil

from tests import fake_engine
from tests.speed.harness import (
    ROOT,
    command_of,
    option,
    section,
    show,
    switch,
)

QUICKSTART = ROOT / "jobs" / "quickstart"
MODEL = QUICKSTART / "model"
PHASES = (
    "startup_s", "ingest_s", "plan_s", "load_s", "engine_s", "publish_s", "close_s", "other_s", "wall_s",
)  # fmt: skip
FORMATS = ("jsonl", "parquet", "csv")
ADDED = 1000
WAIT_S = 3.0  # files that were written a moment ago do not show yet whether they change
STEP_S, FROM_S = 0.307, 10.0
STEPS = "SPEED_STEPS"  # names the file that gets when steps began and ended
FAKE, TIMED = "tests.fake_engine:build", "tests.speed.jobs:build"
Figures = dict[str, Any]
Row = tuple[int, str]


def made(count: int, first: int = 0) -> list[Row]:
    """Return rows of about 60 bytes, no two alike."""
    numbers = range(first, first + count)
    return [(10_000_000 + n, f"order {n * 7919 % 99_999_989:08d} of apples") for n in numbers]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a file of the format that its name tells."""
    lines = path if path.suffix == ".jsonl" else path.parent.parent / "rows.jsonl"
    with lines.open("w") as file:
        file.writelines(f'{{"id": {number}, "text": "{text}"}}\n' for number, text in rows)
    if lines != path:
        duckdb.sql(f"COPY (FROM read_json('{lines}')) TO '{path}'")


def write_job(folder: Path, form: str, rows: list[Row], workers: str = "auto") -> Path:
    """Write a job and its input."""
    (folder / "in").mkdir(parents=True)
    write_rows(folder / "in" / f"a.{form}", rows)
    job = {
        "name": "whole",
        "model": {"path": str(MODEL), "dtype": "float32"},
        "input": {"path": "in", "id": "id", "workers": workers if workers == "auto" else int(workers)},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "res"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    return folder / "job.yaml"


def run(job: str, engine: str, waves_from_s: float | None) -> None:
    """Run a job with an engine of the tests, as the command line does."""
    from batchinfer import cli
    from batchinfer.pipeline import options
    from batchinfer.pipeline.workers import standby

    more: Figures = {} if waves_from_s is None else {"waves_from_s": waves_from_s}
    options.RunOptions = partial(options.RunOptions, engine=engine, **more)  # type: ignore[assignment,misc]
    standby.EngineStandby = partial(standby.EngineStandby, engine)  # type: ignore[assignment,misc]
    sys.argv[1:] = ["run", job, "-q"]
    cli.main()


def reported(folder: Path, columns: str) -> Figures:
    """Return columns of the newest run's report."""
    report = max((folder / "res-report").glob("run-*.parquet"), key=lambda path: path.stat().st_mtime)
    found: Figures = duckdb.sql(f"SELECT {columns} FROM '{report}'").to_arrow_table().to_pylist()[0]
    return found


def memory_bytes(process: psutil.Process) -> dict[str, int]:
    """Return the memory of a process without files' pages, and with them."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return {"own": 0, "all": 0}
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return {"own": sizes["Pss"] - sizes.get("Pss_File", 0), "all": sizes["Pss"]}


def phase_of(folder: Path) -> str:
    """Return the phase that the run in this folder says it is in."""
    try:
        return str(json.loads((folder / ".batchinfer-res" / "progress.json").read_text())["phase"])
    except (OSError, ValueError):  # it has not begun, or has just ended
        return "no phase"


def watched(command: list[str], folder: Path) -> Figures:
    """Run a command to its end, and return the most memory that its processes held together, also by phase, and their
    CPU seconds."""
    before, by_phase = os.times(), dict[str, int]()
    running = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)})
    root, most = psutil.Process(running.pid), {"own": 0, "all": 0}
    while running.poll() is None:
        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        found = [memory_bytes(process) for process in tree]
        most = {kind: max(size, sum(one[kind] for one in found)) for kind, size in most.items()}
        phase, now = phase_of(folder), sum(one["own"] for one in found) >> 20
        by_phase[phase] = max(by_phase.get(phase, 0), now)
        time.sleep(0.5)
    if running.wait():
        raise SystemExit(f"the run ended with exit code {running.returncode}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    sizes = {f"{kind}_mib": round(size / 2**20) for kind, size in most.items()}
    return {"cpu_s": round(cpu, 1)} | sizes | {"own_mib_by_phase": by_phase}


def phases(folder: Path, waves_from_s: float | None) -> Figures:
    """Run the job again. Return seconds by phase, CPU seconds and memory."""
    found = watched(command_of(run, folder / "job.yaml", FAKE, waves_from_s), folder)
    return {name: round(value, 2) for name, value in reported(folder, ", ".join(PHASES)).items()} | found


@section("whole", option("--rows", default=(100_000,)), option("--workers", default="auto"))
def whole(given: Namespace, place: Path) -> list[Figures]:
    """Measure whole jobs: seconds by phase, CPU seconds, and memory."""
    found = list[Figures]()
    for rows in given.rows:
        write_job(place / str(rows), "jsonl", made(rows), given.workers)
        found.append({"rows": rows} | phases(place / str(rows), None))
        shutil.rmtree(place / str(rows))
    show(found)
    return found


def changed(rows: list[Row], inserts: bool) -> list[Row]:
    """Return the rows of the second night."""
    dice, count = random.Random(1), max(1, len(rows) // 100)
    places = sorted(dice.sample(range(len(rows)), count), reverse=True)
    found = list(rows)
    for at, new in zip(places, made(count, 50_000_000), strict=True):
        if inserts:
            found.insert(at, new)
        else:
            found[at] = (rows[at][0], rows[at][1] + " and pears")
    return found


def night(folder: Path) -> Figures:
    """Run the job again with one plan. With waves, reading would be part of the engine's time."""
    found = phases(folder, math.inf)
    return {"outside_s": round(found["wall_s"] - found["engine_s"] - found["load_s"], 2)} | found


@section(
    "nights",
    option("--rows", default=100_000),
    option("--format", choices=FORMATS, default=FORMATS),
    option("--workers", default="auto"),
)
def nights(given: Namespace, place: Path) -> list[Figures]:
    """Measure a second night, in which 1% of the rows changed, against the first.

    JSON lines are changed in place, Parquet files rewritten with every changed row, and into CSV rows are inserted. The
    third night adds a file beside one that did not change. `outside_s` is the run without its engine, and shares are of
    the first night.
    """
    found = list[Figures]()
    for form in given.format:
        folder, rows = place / form, made(given.rows)
        write_job(folder, form, rows, given.workers)
        later = changed(rows, inserts=form == "csv")
        files = (
            ("first", "a", rows),
            ("1% changed", "a", later),
            ("a file added", "b", made(ADDED, 90_000_000)),
        )
        own = list[Figures]()
        for name, file, written in files:
            write_rows(folder / "in" / f"{file}.{form}", written)
            time.sleep(WAIT_S)
            took = night(folder)
            first = own[0] if own else took
            shares = {f"{what}_share": round(took[what] / first[what], 4) for what in ("outside_s", "cpu_s")}
            own.append({"format": form, "night": name, "rows": len(written)} | shares | took)
        kept = sum(file.stat().st_size for file in folder.rglob("kept/*/*"))
        print(f"{form}: {kept / (len(later) + ADDED):.1f} bytes a row are kept")
        found += own
    show(found)
    return found


class TimedEngine(fake_engine.FakeEngine):
    """Writes down when each step began and ended."""

    def step(self) -> fake_engine.FakeOutput:
        began = time.time()
        found = super().step()
        with open(os.environ[STEPS], "a") as file:
            file.write(f"{began} {time.time()}\n")
        return found


def build(*given: Any, **more: Any) -> fake_engine.FakeWeights:
    """Take the place of `batchinfer.engine.load.build.load_weights`."""
    fake_engine.FakeEngine = TimedEngine  # type: ignore[misc]
    return fake_engine.build(*given, **more)


@section(
    "waves",
    option("--rows", default=(10_000, 100_000)),
    option("--format", choices=FORMATS[:2], default="jsonl"),
    switch("--one-plan", "read all rows first"),
)
def waves(given: Namespace, place: Path) -> list[Figures]:
    """Measure whether a device waits, in jobs whose engine takes time for each row.

    A step runs 512 rows in STEP_S seconds, and takes no core. `first_step_s`: seconds from the command's start. `busy`:
    the share of the time from the tenth second to the last step in which the engine ran a step.
    """
    found = [_wave(place / str(rows), rows, given.format, given.one_plan) for rows in given.rows]
    show(found)
    return found


def _wave(folder: Path, rows: int, form: str, one_plan: bool) -> Figures:
    job = write_job(folder, form, made(rows))
    environment = os.environ | {STEPS: str(folder / "steps"), "FAKE_ENGINE_DELAY_S": str(STEP_S)}
    start = time.time()
    command = command_of(run, job, TIMED, math.inf if one_plan else 1.0)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    wall_s = time.time() - start
    steps = [[float(word) - start for word in line.split()] for line in (folder / "steps").open()]
    first, last = steps[0][0], steps[-1][1]
    busy = sum(ended - max(began, FROM_S) for began, ended in steps if ended > FROM_S)
    return {
        "rows": rows,
        "format": form,
        "first_step_s": round(first, 2),
        "busy": round(busy / (last - FROM_S), 4) if last > FROM_S else None,
        "last_step_s": round(last, 1),
        "wall_s": round(wall_s, 1),
        **reported(folder, "waves, again_tokens, parent_peak_rss_bytes >> 20 AS parent_mib"),
    }
