"""Whole jobs of the quickstart with drafts and without."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from ruamel.yaml import YAML

from tests.speed.harness import in_turns, medians, option, ratios, rounds, section, show
from tests.speed.jobs import QUICKSTART, reported, watched

ORDERS = "orders.jsonl"
CHANGED = "JSON."  # an instruction with which the model says nine of ten times what it says with the job's
FIGURES = (
    "wall_s", "engine_s", "steps", "drafted_tokens", "accepted_tokens", "drafts_saved_s", "draft_model_s",
    "sampled_tokens",
)  # fmt: skip
Figures = dict[str, Any]


def ran(folder: Path, rows: int, drafts: Any, changed: bool) -> Figures:
    """Run the quickstart's job in the folder to its end. Return figures of its report."""
    job = YAML(typ="safe").load(QUICKSTART / "job.yaml")
    job["model"]["path"] = str(QUICKSTART / "model")
    job["input"]["path"] = str(folder.parent / ORDERS)
    job["output"]["path"] = "res"
    job["engine"] = {"max_num_seqs": rows}
    job["drafts"] = drafts
    if changed:
        job["prompt"]["system"] = CHANGED
    YAML().dump(job, folder / "job.yaml")
    found = watched([sys.executable, "-m", "batchinfer", "run", str(folder / "job.yaml"), "-q"], folder)
    return reported(folder, ", ".join(FIGURES)) | {"own_mib": found["own_mib"]}


def answers(folder: Path) -> dict[str, str]:
    """Return the answer of each row that has one."""
    if not (folder / "res").exists():
        return {}
    found = duckdb.sql(f"SELECT row_id, generated_text FROM '{folder / 'res'}/*.parquet'").fetchall()
    return {row: text for row, text in found if text is not None}


@section(
    "drafted-jobs",
    option("kind", choices=("earlier", "model"), help="the source of the drafts"),
    option("--small", type=Path, help="the folder of the smaller model"),
    option("--orders", type=int, help="only the first ones"),
    option("--rows-at-once", default=(8, 256)),
    rounds(7),
)
def drafted_jobs(given: Namespace, place: Path) -> list[Figures]:
    """Time whole jobs of the quickstart with drafts and without, each in a folder of its own.

    `earlier`: the job has a result, and then its instruction changes. `model`: a smaller model answers all rows first.
    `as before`: the share of answers that equal the first result's.
    """
    first = place / "first"
    first.mkdir()
    orders = (QUICKSTART / "data" / ORDERS).read_bytes().splitlines(keepends=True)
    (place / ORDERS).write_bytes(b"".join(orders[: given.orders]))
    drafts: Any = ["earlier"]
    changed = given.kind == "earlier"
    if changed:
        ran(first, 256, "off", False)
    else:
        assert given.small is not None, "--small names the folder of the smaller model"
        drafts = {"model": str(given.small.resolve()), "runs": "first"}
    told = list[dict[str, str]]()

    def run(rows: int, drafts: Any, number: int) -> Figures:
        own = place / "own"
        shutil.copytree(first, own)
        found = ran(own, rows, drafts, changed)
        told.append(answers(own))
        shutil.rmtree(own)
        return found

    lines, before = list[Figures](), answers(first)
    for rows in given.rows_at_once:
        found = in_turns(
            {"without": partial(run, rows, "off"), "with": partial(run, rows, drafts)}, given.rounds
        )
        assert all(one == told[0] for one in told), "drafts change answers"
        same = sum(before.get(row) == text for row, text in told[0].items()) / len(told[0])
        engine = {name: [one["engine_s"] for one in runs] for name, runs in found.items()}
        lines += [
            {"rows at once": rows, "way": name, "as before": round(same, 4), **medians(runs)}
            | {"times as fast": ratios(engine["without"], engine[name])}
            for name, runs in found.items()
        ]
    show(lines)
    return lines
