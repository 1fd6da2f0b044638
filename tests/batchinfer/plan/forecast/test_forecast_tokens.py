"""Forecast and actual tokens of whole jobs on a tiny model. The lengths of answers are known, or learned from an
earlier run.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import run, write_job

REAL = RunOptions()
# One sampled token, followed by a forced text
FORCED = {"regex": "[ab] and so on until the very end of it"}


@dataclass(frozen=True)
class KnownJob:
    """`taught`: an earlier run of the same number of other rows taught the lengths of answers. With `again`: of the
    same rows, whose answers were deleted.
    """

    rows: list[dict[str, Any]]
    sampling: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    taught: bool = True
    again: bool = False
    preempts: bool = False


def texts(count: int, words: int = 3, **columns: Any) -> list[dict[str, Any]]:
    draw = random.Random(count)
    return [
        {"text": f"{' '.join(draw.choices(('red', 'green', 'blue'), k=words))} {n}", **columns}
        for n in range(count)
    ]


def tree(levels: int) -> list[dict[str, Any]]:
    rows = [""]
    for level in range(levels):
        rows = [f"{row}branch {side} of level {level}, " for row in rows for side in ("left", "right")]
    return [{"text": row} for row in rows]


def bounded(most: list[int]) -> list[dict[str, Any]]:
    return [{**row, "most": most[n % len(most)]} for n, row in enumerate(texts(90))]


FREE = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
JOBS = {
    "fixed lengths by row": KnownJob(bounded([2, 9, 30]), {"max_tokens": 9, "ignore_eos": True,
        "from_columns": {"max_tokens": "most"}}, taught=False),
    "duplicates and bad rows": KnownJob(texts(30) + texts(30)[:20] + [{"text": None}] * 5,
        {"max_tokens": 9, "ignore_eos": True}, taught=False),
    "a tree of prefixes": KnownJob(tree(6), {"max_tokens": 4, "ignore_eos": True}, taught=False),
    "chunks of long prompts": KnownJob(texts(20, words=60), {"max_tokens": 5, "ignore_eos": True},
        {"max_num_batched_tokens": 64}, taught=False),
    "forced tokens": KnownJob(texts(60), {"max_tokens": 60, **FORCED}),
    "forced tokens, cut by row": KnownJob(bounded([3, 6, 9, 12, 60]),
        {"max_tokens": 60, **FORCED, "from_columns": {"max_tokens": "most"}}),
    "stop strings": KnownJob(texts(200), {**FREE, "stop": ["a", "e", "1"]}, again=True),
    "preemption": KnownJob([*texts(60, answer="[ab]{4}"), *texts(40, words=30, answer="[ab]{90}")],
        {"max_tokens": 110, "from_columns": {"regex": "answer"}}, {"kv_memory": "1MiB"}, again=True, preempts=True),
}  # fmt: skip

QUICK = ("a tree of prefixes", "forced tokens, cut by row")


pytestmark = pytest.mark.usefixtures("known_peaks")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in JOBS]
)
def test_tokens_are_forecast_within_two_percent(name: str, tmp_path: Path, model: Path) -> None:
    job = JOBS[name]
    sections = {"sampling": job.sampling, "engine": job.engine, "on_error": {"max_error_rate": 1.0}}
    if job.taught:
        others = job.rows if job.again else [{**row, "text": f"{row['text']}!"} for row in job.rows]
        first = run(write_job(tmp_path, model, others, **sections), REAL).row
        assert first["forecast_answers_from"] == 0
        if job.again:
            shutil.rmtree(tmp_path / "out/.batchinfer-res")
    row = run(write_job(tmp_path, model, job.rows, **sections), REAL).row
    assert row["forecast_answers_from"] == job.taught
    assert (row["preemptions"] > 0) == job.preempts
    pairs = {"forecast_prompt_tokens": "prompt_tokens_run", "forecast_output_tokens": "output_tokens"}
    for forecast, fact in pairs.items():
        assert row[forecast] == pytest.approx(row[fact], rel=0.02), fact
    report = row["run_id"]
    flops = pq.read_table(tmp_path / f"out/res-report/requests-{report}.parquet").column("flops").to_numpy()
    assert flops.sum() == pytest.approx(row["flops"], rel=1e-6), "what requests ran is what steps ran"
    prefixes = pq.read_table(tmp_path / f"out/res-report/prefixes-{report}.parquet")
    saved, cached = (prefixes.column(name).to_numpy() for name in ("saved_tokens", "cached_tokens"))
    assert (cached <= saved).all()
    assert cached.sum() <= row["prefix_saved_tokens"]
