"""Whole jobs of many short rows, whose engine is the tests' fake one.

The tokenizer is the quickstart's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import duckdb
import psutil

from tests.speed.processes import command_of
from tests.suite.run import ROOT
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import Metrics

MODEL = ROOT / "jobs" / "quickstart" / "model"
PHASES = "startup_s, ingest_s, plan_s, load_s, engine_s, publish_s, close_s, other_s, wall_s"
ENGINE = "tests.fake_engine:build"


def write_job(folder: Path, rows: int, workers: str) -> Path:
    """Write a job and its input: rows of about 60 bytes, no two alike."""
    folder.mkdir()
    with (folder / "in.jsonl").open("w") as file:
        for row in range(rows):
            text = f"order {row * 7919 % 99_999_989:08d} of apples"
            file.write(f'{{"id": {10_000_000 + row}, "text": "{text}"}}\n')
    job = {
        "name": "whole",
        "model": {"path": str(MODEL), "dtype": "float32"},
        "input": {"path": "in.jsonl", "id": "id", "workers": workers if workers == "auto" else int(workers)},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "res"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    return folder / "job.yaml"


def run(job: str, more: Sequence[str] = (), clock: str | None = None, engine: str = ENGINE) -> None:
    """Run a job as the command line does.

    Args:
        more: Options of the command.
        clock: The file that gets the CPU seconds of this process.
        engine: The function "module:function" that loads the engine.
    """
    from batchinfer import cli
    from batchinfer.pipeline import options
    from batchinfer.pipeline.workers import standby

    options.RunOptions = partial(options.RunOptions, engine=engine)  # type: ignore[assignment,misc]
    standby.EngineStandby = partial(standby.EngineStandby, engine)  # type: ignore[assignment,misc]
    sys.argv[1:] = ["run", job, "-q", *more]
    try:
        cli.main()
    finally:
        if clock is not None:
            Path(clock).write_text(str(time.process_time()))


def own_bytes(process: psutil.Process) -> int:
    """Return the memory of a process without files' pages; a page that several processes share counts in part."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return 0
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return sizes["Pss"] - sizes.get("Pss_File", 0)


def phase_of(folder: Path) -> str:
    """Return the phase that the run in this folder says it is in."""
    try:
        return str(json.loads((folder / ".batchinfer-res" / "progress.json").read_text())["phase"])
    except (OSError, ValueError):  # it has not begun, or has just ended
        return "no phase"


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each number of rows."""
    return [(f"{rows} rows", partial(_whole, section, rows)) for rows in section.given.rows]


def _whole(section: BenchSection, rows: int) -> Result:
    """Return seconds by phase, CPU seconds, and the peak memory of all processes together."""
    folder = section.place / str(rows)
    command, before = command_of(run, write_job(folder, rows, section.given.workers)), os.times()
    most = dict[str, int]()
    running = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)})
    root = psutil.Process(running.pid)
    while running.poll() is None:
        with suppress(psutil.NoSuchProcess):
            held = sum(map(own_bytes, [root, *root.children(recursive=True)]))
            most[phase_of(folder)] = max(most.get(phase_of(folder), 0), held)
        time.sleep(0.5)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    after, report = os.times(), max((folder / "res-report").glob("run-*.parquet"), key=os.path.getmtime)
    found: Metrics = duckdb.sql(f"SELECT {PHASES} FROM '{report}'").to_arrow_table().to_pylist()[0]
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    shutil.rmtree(folder)
    sizes = {"peak_bytes": max(most.values(), default=0), "phase_bytes": most}
    return Result(f"{rows} rows", metrics={**found, "cpu_s": cpu, **sizes})
