"""Measures whether a device waits: an engine that takes time for each row, and no model, in jobs of many short rows.

    python -m tests.batchinfer.pipeline.wave_times 10000 100000 1000000 --format parquet

A step runs 512 rows in STEP_S seconds, and takes no core. Every line is JSON: the seconds from the command's start to
the first step, the share of the time from the tenth second to the last step in which the engine ran a step, and what
the run's report says. `--one-plan`: all rows are read first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from tests import fake_engine
from tests.batchinfer.pipeline.whole_job_times import JOB, MODEL, ROOT, write_rows

STEP_S, FROM_S = 0.307, 10.0
STEPS = "WAVE_TIMES_STEPS"  # names the file that gets when steps began and ended
ENGINE = "tests.batchinfer.pipeline.wave_times:build"


class TimedEngine(fake_engine.FakeEngine):
    """Writes down when each step began and ended."""

    def step(self) -> fake_engine.FakeOutput:
        began = time.time()
        found = super().step()
        with open(os.environ[STEPS], "a") as file:
            file.write(f"{began} {time.time()}\n")
        return found


def build(*given: Any, **more: Any) -> fake_engine.FakeWeights:
    """Takes the place of `batchinfer.engine.load.build.load_weights`."""
    fake_engine.FakeEngine = TimedEngine  # type: ignore[misc]
    return fake_engine.build(*given, **more)


def run(path: str, from_s: str) -> None:
    """Run a job with this engine, in a process of its own."""
    from batchinfer import cli
    from batchinfer.pipeline import options
    from batchinfer.pipeline.workers import standby

    given = partial(options.RunOptions, engine=ENGINE, waves_from_s=float(from_s))
    options.RunOptions = given  # type: ignore[assignment,misc]
    standby.EngineStandby = partial(standby.EngineStandby, ENGINE)  # type: ignore[assignment,misc]
    sys.argv[1:] = ["run", path, "-q"]
    cli.main()


def measure(folder: Path, rows: int, form: str, one_plan: bool) -> dict[str, Any]:
    """Run a job of so many rows in an empty folder."""
    write_rows(folder / "rows.jsonl", rows)
    if form == "parquet":
        duckdb.sql(f"COPY (FROM read_json('{folder}/rows.jsonl')) TO '{folder}/rows.parquet'")
    places = {"model": MODEL, "rows": folder / f"rows.{form}", "results": folder / "res"}
    (folder / "job.yaml").write_text(JOB.format(workers="auto", **places))
    environment = os.environ | {STEPS: str(folder / "steps"), "FAKE_ENGINE_DELAY_S": str(STEP_S)}
    code = f"import sys; from {ENGINE.split(':')[0]} import run; "
    command = [sys.executable, "-c", f"{code}run(*sys.argv[1:3])", str(folder / "job.yaml")]
    start = time.time()
    subprocess.run([*command, "inf" if one_plan else "1"], cwd=ROOT, env=environment, check=True)
    wall_s = time.time() - start
    steps = [[float(word) - start for word in line.split()] for line in (folder / "steps").open()]
    first, last = steps[0][0], steps[-1][1]
    busy = sum(ended - max(began, FROM_S) for began, ended in steps if ended > FROM_S)
    (report,) = (folder / "res-report").glob("run-*.parquet")
    columns = "waves, again_tokens, parent_peak_rss_bytes >> 20 AS parent_mib"
    return {
        "rows": rows,
        "format": form,
        "first_step_s": round(first, 2),
        "busy": round(busy / (last - FROM_S), 4) if last > FROM_S else None,
        "last_step_s": round(last, 1),
        "wall_s": round(wall_s, 1),
        **duckdb.sql(f"SELECT {columns} FROM '{report}'").to_arrow_table().to_pylist()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--one-plan", action="store_true")
    given = parser.parse_args()
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(Path(name), rows, given.format, given.one_plan)), flush=True)


if __name__ == "__main__":
    main()
