"""Measures a second night, of which 1% of the rows changed, against the first: seconds by phase, CPU seconds, memory.

    python -m tests.batchinfer.pipeline.night_times --rows 1000000 --format jsonl parquet csv

The engine, the tokenizer and the rows are those of whole_job_times.py. JSON lines are changed in place, Parquet files
rewritten with every changed row, and into CSV rows are inserted. The third night adds a file beside one that did not
change. Every line is JSON; `outside_s` is the run without its engine, and shares are of the first night. With
`--ingest-only` the rows are merely read, as if all answers were there: CPU seconds of the command and of its workers,
which say something on a busy machine, too.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.store.index.ingest import ingest
from batchinfer.store.index.keeping import Keeping
from tests.batchinfer.pipeline.whole_job_times import JOB, MODEL, PHASES, watched

Row = tuple[int, str]
Night = Callable[[Path], dict[str, Any]]
ADDED = 1000
WAIT_S = 3.0  # files that were written a moment ago do not show yet whether they change


def jsonl(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"id": {number}, "text": "{text}"}}\n' for number, text in rows)


def parquet(path: Path, rows: Sequence[Row]) -> None:
    ids, texts = zip(*rows, strict=True)
    pq.write_table(pa.table({"id": ids, "text": texts}), path)


def table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *rows])


WRITERS: dict[str, Callable[[Path, Sequence[Row]], None]] = {"jsonl": jsonl, "parquet": parquet, "csv": table}


def made(count: int, first: int = 0) -> list[Row]:
    """Rows of about 60 bytes, no two alike."""
    return [
        (10_000_000 + n, f"order {n * 7919 % 99_999_989:08d} of apples") for n in range(first, first + count)
    ]


def changed(rows: list[Row], inserts: bool) -> list[Row]:
    """Return the rows of the second night."""
    dice, count = random.Random(1), max(1, len(rows) // 100)
    if not inserts:
        found = list(rows)
        for at in dice.sample(range(len(rows)), count):
            found[at] = (rows[at][0], rows[at][1] + " and pears")
        return found
    before: dict[int, Row] = dict(
        zip(dice.sample(range(len(rows)), count), made(count, 50_000_000), strict=True)
    )
    return [one for at, row in enumerate(rows) for one in ([before[at], row] if at in before else [row])]


def night(folder: Path) -> dict[str, Any]:
    """Run the job once more. Return what it took, by phase."""
    command = [sys.executable, "-m", "tests.batchinfer.pipeline.one_plan_cli", "run"]
    found = watched([*command, str(folder / "job.yaml"), "-q"], folder)
    report = max((folder / "res-report").glob("run-*.parquet"), key=lambda path: path.stat().st_mtime)
    times = duckdb.sql(f"SELECT {', '.join(PHASES)} FROM '{report}'").fetchall()[0]
    phases = dict(zip(PHASES, (round(one, 2) for one in times), strict=True))
    outside = phases["wall_s"] - phases["engine_s"] - phases["load_s"]
    return {"outside_s": round(outside, 2)} | phases | found


def read(folder: Path) -> dict[str, Any]:
    """Ingest the rows once more. Return the CPU seconds that it took."""
    job = load_job(folder / "job.yaml")
    setup = check_setup(job, state_of(job), this_machine("cpu"))
    settings = setup.ingest_options(bytes(32), datetime(2026, 1, 1))
    keeping = Keeping(folder / "kept", lambda _: True, print)
    before, began = os.times(), time.perf_counter()
    ingest(job, setup.tokenizer, settings, folder / "scratch", keeping=keeping)
    after, seconds = os.times(), time.perf_counter() - began
    parent = after.user + after.system - before.user - before.system
    workers = sum(after[2:4]) - sum(before[2:4])
    times = {
        "cpu_s": parent + workers,
        "parent_cpu_s": parent,
        "workers_cpu_s": workers,
        "outside_s": seconds,
    }
    return {name: round(value, 2) for name, value in times.items()}


def measure(folder: Path, form: str, count: int, workers: str, night: Night) -> None:
    """Run three nights of a job in an empty folder, and print what each took."""
    (folder / "in").mkdir(parents=True)
    write, rows = WRITERS[form], made(count)
    places = {"model": MODEL, "rows": folder / "in", "results": folder / "res"}
    (folder / "job.yaml").write_text(JOB.format(workers=workers, **places))
    first: dict[str, Any] = {}

    def tell(name: str, rows: int) -> None:
        time.sleep(WAIT_S)
        found = night(folder)
        first.update({} if first else found)
        shares = {f"{what}_share": round(found[what] / first[what], 4) for what in ("outside_s", "cpu_s")}
        print(json.dumps({"format": form, "night": name, "rows": rows} | shares | found), flush=True)

    write(folder / "in" / f"a.{form}", rows)
    tell("first", count)
    rows = changed(rows, inserts=form == "csv")
    write(folder / "in" / f"a.{form}", rows)
    tell("1% changed", len(rows))
    write(folder / "in" / f"b.{form}", made(ADDED, 90_000_000))
    tell("a file added", len(rows) + ADDED)
    kept = sum(file.stat().st_size for file in folder.rglob("kept/*/*"))
    print(json.dumps({"kept_bytes_a_row": round(kept / (len(rows) + ADDED), 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--format", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--ingest-only", action="store_true")
    given = parser.parse_args()
    for form in given.format:
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name) / "job", form, given.rows, given.workers, read if given.ingest_only else night)


if __name__ == "__main__":
    main()
