"""The quickstart job, run as a user runs it: the shipped model answers, and the answers are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

JOB = Path(__file__).parents[2] / "jobs/quickstart/job.yaml"
LEAST = 0.97


def run(output: Path, *arguments: str) -> dict[str, object]:
    """The run table's row of `batchinfer run`, with the results in `output`."""
    command = [
        sys.executable,
        "-m",
        "batchinfer",
        "run",
        str(JOB),
        "--json",
        "--set",
        f"output.path={output}",
    ]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    row: dict[str, object] = json.loads(done.stdout)
    return row


def accuracy(results: Path) -> tuple[int, int, float]:
    """(clean rows, bad rows that are error rows, share of clean rows that are exactly right)."""
    found = duckdb.sql(
        "SELECT count(*) FILTER (WHERE expected IS NOT NULL), "
        "count(*) FILTER (WHERE expected IS NULL AND status = 'error' AND error_code IS NOT NULL), "
        "avg((generated_text = expected)::INT) FILTER (WHERE expected IS NOT NULL), count(*) "
        f"FROM read_parquet('{results}/*.parquet')"
    ).fetchall()[0]
    clean, bad, right, rows = found
    assert clean + bad == rows, "every row is either clean or an error row"
    return clean, bad, right


def test_the_whole_job_is_right(tmp_path):
    row = run(tmp_path / "quickstart")
    clean, bad, right = accuracy(tmp_path / "quickstart")
    print(
        f"{right:.2%} of {clean} rows, {bad} bad rows, {row['dtype']}, {row['engine_s']:.1f} s in the engine"
    )
    assert clean >= 2000
    assert bad >= 8
    assert right >= LEAST
    assert row["duplicate_rows"] >= 100  # type: ignore[operator]
    assert row["prefix_saved_tokens"] > 50_000  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_right_in_every_dtype(tmp_path, dtype):
    run(tmp_path / "quickstart", "--set", f"model.dtype={dtype}")
    clean, _, right = accuracy(tmp_path / "quickstart")
    print(f"{right:.2%} of {clean} rows in {dtype}")
    assert right >= LEAST
