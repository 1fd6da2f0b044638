"""Measures a whole job of many short rows, everything but the model: seconds by phase, CPU seconds, and memory.

    python tests/batchinfer/pipeline/whole_job_times.py --rows 1000000 10000000 --workers 2

The engine is the tests' fake one, whose answers are up to eight tokens; the tokenizer is the quickstart's. Every line
is JSON. Memory is that of all processes of the run together, each page counted once (Pss), files' pages not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import psutil

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "jobs" / "quickstart" / "model"
PHASES = (
    "startup_s",
    "ingest_s",
    "plan_s",
    "load_s",
    "engine_s",
    "publish_s",
    "close_s",
    "other_s",
    "wall_s",
)
JOB = """
name: whole
model: {{path: {model}, dtype: float32}}
input: {{path: {rows}, id: id, workers: {workers}}}
prompt: {{user: "{{{{ text }}}}"}}
sampling: {{max_tokens: 8}}
output: {{path: {results}}}
"""


def write_rows(path: Path, rows: int) -> None:
    """Rows of about 60 bytes, no two alike."""
    with path.open("w") as file:
        for row in range(rows):
            file.write(
                f'{{"id": {10_000_000 + row}, "text": "order {row * 7919 % 99_999_989:08d} of apples"}}\n'
            )


def memory_bytes(process: psutil.Process) -> dict[str, int]:
    """Return the memory of a process without files' pages, and with them."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended meanwhile
        return {"own": 0, "all": 0}
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return {"own": sizes["Pss"] - sizes.get("Pss_File", 0), "all": sizes["Pss"]}


def phase_of(folder: Path) -> str:
    """Return what the run in this folder says that it does."""
    try:
        return str(json.loads((folder / ".batchinfer-res" / "progress.json").read_text())["phase"])
    except (OSError, ValueError):  # it has not begun, or has just ended
        return "no phase"


def watched(command: list[str], folder: Path) -> dict[str, Any]:
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


def measure(folder: Path, rows: int, workers: str) -> dict[str, Any]:
    """Run a job of so many rows in an empty folder."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", rows)
    places = {"model": MODEL, "rows": folder / "rows.jsonl", "results": folder / "res"}
    (folder / "job.yaml").write_text(JOB.format(workers=workers, **places))
    found = watched([sys.executable, "-m", "tests.fake_cli", "run", str(folder / "job.yaml"), "-q"], folder)
    (report,) = (folder / "res-report").glob("run-*.parquet")
    times = duckdb.sql(f"SELECT {', '.join(PHASES)} FROM '{report}'").fetchall()[0]
    return {"rows": rows} | dict(zip(PHASES, (round(one, 2) for one in times), strict=True)) | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--workers", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for rows in given.rows:
            print(json.dumps(measure(Path(name) / str(rows), rows, given.workers)), flush=True)
            shutil.rmtree(Path(name) / str(rows))


if __name__ == "__main__":
    main()
