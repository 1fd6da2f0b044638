"""How long a job takes one process, and ranks that share its cores."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.speed.harness import in_turns, medians, option, rounds, section, show
from tests.speed.loading import make

LAYOUTS = {
    "one": (),
    "tp2": ("engine.tensor_parallel_size=2",),
    "pp2": ("engine.pipeline_parallel_size=2",),
    "ep2": ("engine.expert_parallel_size=2",),
}


def write_job(folder: Path, model: Path, given: Namespace) -> Path:
    """Write the job and its input: prompts of as many letters as tokens are asked for, no two of which begin alike."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = (f"{row:06d}".ljust(given.prompt, "abcdefghij"[row % 10]) for row in range(given.rows))
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    job = {
        "name": "ranks",
        "model": {
            "path": str(model),
            "dtype": given.dtype,
            "max_model_len": given.prompt + given.tokens + 8,
        },
        "input": {"path": "in.jsonl"},
        "prompt": {"text": "text"},
        "sampling": {"max_tokens": given.tokens, "ignore_eos": True},
        "output": {"path": "out/res"},
        "engine": {"device": "cpu"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    return folder / "job.yaml"


def ran(job: Path, layout: str, _: int) -> dict[str, float | None]:
    """Run the job once more, from nothing; what its report says. Raises CalledProcessError where it fails."""
    out = Path(tempfile.mkdtemp(prefix="out-", dir=job.parent)) / "res"
    settings = (f"output.path={out}", *LAYOUTS[layout])
    command = [sys.executable, "-m", "batchinfer", "run", "-q", str(job)]
    subprocess.run([*command, *(part for one in settings for part in ("--set", one))], check=True)
    tables = out.parent / "res-report"
    (row,) = pq.read_table(next(tables.glob("run-*.parquet"))).to_pylist()
    ranks = [one for path in tables.glob("ranks-*.parquet") for one in pq.read_table(path).to_pylist()]
    summed = [one["collective_s"] for one in ranks if one["collective_s"] is not None]
    return {
        "engine_s": row["engine_wall_s"],
        "output_tokens_per_s": row["output_tokens_per_s"],
        "prompt_tokens_per_s": row["prompt_tokens_per_s"],
        "collective_s": row["collective_s"],
        "least_collective_s": min(summed, default=None),
        "stage_wait_s": row["stage_wait_s"],
        "load_s": row["load_s"],
        "peak_gib": row["worker_peak_rss_bytes"] / 2**30,
    }


@section(
    "ranks",
    option("--model", default="qwen2.5-0.5b"),
    option("--rows", default=48),
    option("--prompt", default=256, help="tokens"),
    option("--tokens", default=32, help="of an answer"),
    option("--dtype", default="bfloat16"),
    option("--layouts", choices=LAYOUTS, default=("one", "tp2", "pp2")),
    rounds(3),
)
def ranks(given: Namespace, place: Path) -> list[dict[str, Any]]:
    """Time whole jobs in one process, and divided among ranks that have the same cores between them.

    Random weights; rows share nothing. `engine_s` is the report's `engine_wall_s`; `collective_s` what sums and gathers
    over ranks took rank 0, its waiting for others included, and `least_collective_s` the rank that waited the least;
    `stage_wait_s` what a stage waited.
    """
    from tests.checkpoints import make_tokenizer

    make(given.model, place / "model", 1)
    make_tokenizer(place / "model")
    job = write_job(place / "job", place / "model", given)
    runs = in_turns({layout: partial(ran, job, layout) for layout in given.layouts}, given.rounds)
    lines = [{"layout": layout, **medians(each)} for layout, each in runs.items()]
    show(lines)
    return lines
