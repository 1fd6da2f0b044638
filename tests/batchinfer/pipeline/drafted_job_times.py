"""Times whole jobs of the quickstart with drafts and without, in turns, each in a folder of its own.

python -m tests.batchinfer.pipeline.drafted_job_times earlier [--rows-at-once 8 256] [--pairs 7]
python -m tests.batchinfer.pipeline.drafted_job_times model --small FOLDER [--rows-at-once 8 256] [--pairs 7]

`earlier`: the job has a result, and then its instruction changes. `model`: a smaller model answers all rows first.
`--orders`: only the first orders. Every line is JSON: for each way the medians of the run's and the engine's seconds
and the peak memory of all its processes; how many answers are as before; and how many drafts were right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import duckdb
from ruamel.yaml import YAML

from tests.batchinfer.pipeline.whole_job_times import ROOT, watched

QUICKSTART = ROOT / "jobs" / "quickstart"
ORDERS = "orders.jsonl"
CHANGED = "JSON."  # an instruction with which the model says nine of ten times what it says with the job's
FIGURES = (
    "wall_s",
    "engine_s",
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "drafts_saved_s",
    "draft_model_s",
    "sampled_tokens",
)
Ways = dict[str, Any]  # the drafts of each way to run the job


def write_job(folder: Path, rows: int, drafts: Any, changed: bool) -> None:
    """Write the quickstart's job, whose result lies in the folder."""
    job = YAML(typ="safe").load(QUICKSTART / "job.yaml")
    job["model"]["path"] = str(QUICKSTART / "model")
    job["input"]["path"] = str(folder.parent / ORDERS)
    job["output"]["path"] = "res"
    job["engine"] = {"max_num_seqs": rows}
    job["drafts"] = drafts
    if changed:
        job["prompt"]["system"] = CHANGED
    YAML().dump(job, folder / "job.yaml")


def run(folder: Path, rows: int, drafts: Any, changed: bool) -> dict[str, Any]:
    """Run the job to its end; what it took."""
    write_job(folder, rows, drafts, changed)
    before = set((folder / "res-report").glob("run-*.parquet"))
    found = watched([sys.executable, "-m", "batchinfer", "run", str(folder / "job.yaml"), "-q"], folder)
    (report,) = set((folder / "res-report").glob("run-*.parquet")) - before
    (figures,) = duckdb.sql(f"SELECT {', '.join(FIGURES)} FROM '{report}'").fetchall()
    return dict(zip(FIGURES, figures, strict=True)) | {"own_mib": found["own_mib"]}


def answers(folder: Path) -> dict[str, str]:
    """Return the answer of each row that has one."""
    found = duckdb.sql(f"SELECT row_id, generated_text FROM '{folder / 'res'}/*.parquet'").fetchall()
    return {row: text for row, text in found if text is not None}


def compare(folder: Path, rows: int, asked: Ways, changed: bool, pairs: int) -> dict[str, Any]:
    """Run the job in these ways in turns, the first without drafts; all begin with what the folder has."""
    ways: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    told = list[dict[str, str]]()
    for number in range(pairs):
        for name, drafts in asked.items():
            own = folder.parent / f"{name}-{number}"
            shutil.copytree(folder, own)
            ways[name].append(run(own, rows, drafts, changed))
            told.append(answers(own))
            shutil.rmtree(own)
    assert all(one == told[0] for one in told), "drafts change answers"
    before = answers(folder) if (folder / "res").exists() else {}
    medians = {
        name: {figure: statistics.median(one[figure] or 0 for one in found) for figure in found[0]}
        for name, found in ways.items()
    }
    without, *others = ways
    ratios = {
        name: sorted(a["engine_s"] / b["engine_s"] for a, b in zip(ways[without], ways[name], strict=True))
        for name in others
    }
    same = sum(before.get(row) == text for row, text in told[0].items()) / len(told[0])
    return {"rows_at_once": rows, "as_before": round(same, 4), "engine_gain": ratios, **medians}


def ways_of(kind: str, small: Path | None) -> Ways:
    """Return the drafts that are compared."""
    if kind == "earlier":
        return {"without": "off", "with": ["earlier"]}
    assert small is not None, "--small names the folder of the smaller model"
    return {"without": "off", "with": {"model": str(small.resolve()), "runs": "first"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("earlier", "model"))
    parser.add_argument("--small", type=Path)
    parser.add_argument("--orders", type=int)
    parser.add_argument("--rows-at-once", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "first"
        folder.mkdir()
        orders = (QUICKSTART / "data" / ORDERS).read_bytes().splitlines(keepends=True)
        (Path(name) / ORDERS).write_bytes(b"".join(orders[: given.orders]))
        if given.kind == "earlier":
            run(folder, 256, "off", False)
        ways = ways_of(given.kind, given.small)
        for rows in given.rows_at_once:
            found = compare(folder, rows, ways, given.kind == "earlier", given.pairs)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
