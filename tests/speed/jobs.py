"""Whole jobs of many short rows, whose engine is the tests' fake one.

The tokenizer is the quickstart's.
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
from contextlib import suppress
from functools import partial
from pathlib import Path

import duckdb
import psutil

from tests.speed.processes import command_of
from tests.suite.run import ROOT
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import Figures

QUICKSTART = ROOT / "jobs" / "quickstart"
MODEL = QUICKSTART / "model"
PHASES = "startup_s, ingest_s, plan_s, load_s, engine_s, publish_s, close_s, other_s, wall_s"
ADDED = 1000
WAIT_S = 3.0  # files that were written a moment ago do not show yet whether they change
ENGINE = "tests.fake_engine:build"
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


def run(job: str, waves_from_s: float | None) -> None:
    """Run a job with the fake engine, as the command line does."""
    from batchinfer import cli
    from batchinfer.pipeline import options
    from batchinfer.pipeline.workers import standby

    more: Figures = {} if waves_from_s is None else {"waves_from_s": waves_from_s}
    options.RunOptions = partial(options.RunOptions, engine=ENGINE, **more)  # type: ignore[assignment,misc]
    standby.EngineStandby = partial(standby.EngineStandby, ENGINE)  # type: ignore[assignment,misc]
    sys.argv[1:] = ["run", job, "-q"]
    cli.main()


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


def phases(folder: Path, waves_from_s: float | None = None) -> Figures:
    """Run the job again. Return seconds by phase, CPU seconds, and the most memory that all processes held together."""
    command, before = command_of(run, folder / "job.yaml", waves_from_s), os.times()
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
    found: Figures = duckdb.sql(f"SELECT {PHASES} FROM '{report}'").to_arrow_table().to_pylist()[0]
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return found | {"cpu_s": cpu, "peak_bytes": max(most.values(), default=0), "phase_bytes": most}


def whole(section: BenchSection) -> list[Part]:
    """Return a part for each number of rows."""
    return [(f"{rows} rows", partial(_whole, section, rows)) for rows in section.given.rows]


def _whole(section: BenchSection, rows: int) -> Result:
    folder = section.place / str(rows)
    write_job(folder, "jsonl", made(rows), section.given.workers)
    found = Result(f"{rows} rows", figures=phases(folder))
    shutil.rmtree(folder)
    return found


def nights(section: BenchSection) -> list[Part]:
    """Return a part for each format: a second night, in which 1% of the rows changed, against the first.

    JSON lines are changed in place, Parquet files rewritten with every changed row, and into CSV rows are inserted. The
    third night adds a file beside one that did not change. `outside_s` is the run without its engine, and shares are of
    the first night.
    """
    return [(form, partial(_nights, section, form)) for form in section.given.format]


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


def _nights(section: BenchSection, form: str) -> list[Result]:
    folder, rows = section.place / form, made(section.given.rows)
    write_job(folder, form, rows, section.given.workers)
    later = changed(rows, inserts=form == "csv")
    files = (("first", "a", rows), ("1% changed", "a", later), ("a file added", "b", made(ADDED, 90_000_000)))
    found, first = list[Result](), Figures()
    for name, file, written in files:
        write_rows(folder / "in" / f"{file}.{form}", written)
        time.sleep(WAIT_S)
        took = phases(folder, math.inf)  # with waves, reading would be part of the engine's time
        took["outside_s"] = took["wall_s"] - took["engine_s"] - took["load_s"]
        first = first or took
        shares = {f"{what}_share": took[what] / first[what] for what in ("outside_s", "cpu_s")}
        found.append(Result(f"{form}, {name}, {len(written)} rows", figures=took | shares))
    kept = sum(file.stat().st_size for file in folder.rglob("kept/*/*"))
    return [*found, Result(f"{form}, kept of a row", figures={"bytes": kept / (len(later) + ADDED)})]
