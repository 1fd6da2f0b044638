"""Whole jobs of the quickstart with drafts and without, each in a folder of its own.

`earlier`: the job has a result, and then its instruction changes. `model`: a smaller model answers all rows first.
`as_before_share`: the share of answers that equal the first result's.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from ruamel.yaml import YAML

from tests.speed.jobs import QUICKSTART, reported, watched
from tests.suite.section import BenchSection, Part, Result, WrongResult
from tests.suite.turns import Figures, compared

ORDERS = "orders.jsonl"
CHANGED = "JSON."  # an instruction with which the model says nine of ten times what it says with the job's
FIGURES = """wall_s, engine_s, steps, drafted_tokens, accepted_tokens, drafts_saved_s, draft_model_s,
sampled_tokens"""


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each number of rows at once."""
    return [(f"{rows} rows at once", partial(_jobs, section, rows)) for rows in section.given.rows_at_once]


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
    return reported(folder, FIGURES) | {"own_mib": found["own_mib"]}


def answers(folder: Path) -> dict[str, str]:
    """Return the answer of each row that has one."""
    if not (folder / "res").exists():
        return {}
    found = duckdb.sql(f"SELECT row_id, generated_text FROM '{folder / 'res'}/*.parquet'").fetchall()
    return {row: text for row, text in found if text is not None}


def _first(section: BenchSection) -> Path:
    """Return the folder of the result that is there before, which is made when it is first asked for."""
    first, given = section.place / "first", section.given
    if not first.exists():
        first.mkdir()
        orders = (QUICKSTART / "data" / ORDERS).read_bytes().splitlines(keepends=True)
        (section.place / ORDERS).write_bytes(b"".join(orders[: given.orders]))
        if given.kind == "earlier":
            ran(first, 256, "off", False)
    return first


def _jobs(section: BenchSection, rows: int) -> list[Result]:
    given, first = section.given, _first(section)
    drafts: Any = ["earlier"]
    if given.kind == "model":
        drafts = {"model": str(given.small.resolve()), "runs": "first"}
    told = list[dict[str, str]]()

    def run(drafts: Any, _: int) -> Figures:
        own = section.place / "own"
        shutil.copytree(first, own)
        found = ran(own, rows, drafts, given.kind == "earlier")
        told.append(answers(own))
        shutil.rmtree(own)
        before = answers(first)
        return found | {
            "as_before_share": sum(before.get(row) == text for row, text in told[0].items()) / len(told[0])
        }

    ways = {"without": partial(run, "off"), "with": partial(run, drafts)}
    found = compared(f"{rows} rows at once", ways, given.rounds, "engine_s")
    if any(one != told[0] for one in told):
        raise WrongResult("drafts change answers")
    return found
