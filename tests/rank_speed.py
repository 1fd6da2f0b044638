"""How long a job takes one process, and ranks that share its cores: runs of whole jobs in turns, and their medians.

    python -m tests.rank_speed [--model qwen2.5-0.5b] [--rows 48] [--prompt 256] [--tokens 32] [--rounds 3]
        [--dtype bfloat16] [--layouts one tp2 pp2] [--folder DIR]

Writes the model with random weights, and runs a job of rows that share nothing: in one process with a thread for each
core, and divided among ranks that have the same cores between them. `engine_s` is the report's `engine_wall_s`;
`collective_s` what sums and gathers over ranks took rank 0, its waiting for others included, and `least_collective_s`
the rank that waited the least; `stage_wait_s` what a stage waited. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.load_speed import make

LAYOUTS = {
    "one": (),
    "tp2": ("engine.tensor_parallel_size=2",),
    "pp2": ("engine.pipeline_parallel_size=2",),
    "ep2": ("engine.expert_parallel_size=2",),
}
MEASURED = (
    "engine_s", "output_tokens_per_s", "prompt_tokens_per_s", "collective_s", "least_collective_s", "stage_wait_s",
    "load_s", "peak_gib",
)  # fmt: skip


def write_job(folder: Path, model: Path, options: argparse.Namespace) -> Path:
    """Write the job and its input: prompts of as many letters as tokens are asked for, no two of which begin alike."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = (f"{row:06d}".ljust(options.prompt, "abcdefghij"[row % 10]) for row in range(options.rows))
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    job = {
        "name": "ranks",
        "model": {
            "path": str(model),
            "dtype": options.dtype,
            "max_model_len": options.prompt + options.tokens + 8,
        },
        "input": {"path": "in.jsonl"},
        "prompt": {"text": "text"},
        "sampling": {"max_tokens": options.tokens, "ignore_eos": True},
        "output": {"path": "out/res"},
        "engine": {"device": "cpu"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    return folder / "job.yaml"


def ran(job: Path, layout: str) -> dict[str, float | None]:
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


def medians(runs: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of each figure; None where it is not known."""
    found: dict[str, float | None] = {}
    for name in MEASURED:
        known = [value for run in runs if (value := run[name]) is not None]
        found[name] = statistics.median(known) if known else None
    return found


def shown(name: str, figures: dict[str, float | None]) -> str:
    """A line of the table."""
    values = ("-" if figures[each] is None else f"{figures[each]:.2f}" for each in MEASURED)
    return f"{name:<6}" + "".join(f"{value:>21}" for value in values)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run each layout in turn, so many rounds."""
    from tests.checkpoints import make_tokenizer

    make(options.model, folder / "model", 1)
    make_tokenizer(folder / "model")
    job = write_job(folder / "job", folder / "model", options)
    runs: dict[str, list[dict[str, float | None]]] = {layout: [] for layout in options.layouts}
    print(f"{'':<6}" + "".join(f"{each:>21}" for each in MEASURED))
    for number in range(options.rounds):
        for layout in options.layouts:
            runs[layout].append(ran(job, layout))
            print(shown(layout, runs[layout][-1]) + f"  round {number + 1}", flush=True)
    found = {layout: medians(each) for layout, each in runs.items()}
    for layout, figures in found.items():
        print(shown(layout, figures) + "  median")
    return found


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one", "tp2", "pp2"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rank-speed-") as made:
        found = measure(options, options.folder or Path(made))
    print(
        json.dumps(
            {**vars(options), "folder": None, "cores": os.cpu_count(), "at": time.time(), "median": found}
        )
    )


if __name__ == "__main__":
    main()
