"""Runs the quickstart job like a user: the shipped model gives right answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import duckdb
import pytest
from ruamel.yaml import YAML

from tests import warm_commands

JOB = Path(__file__).parents[2] / "jobs/quickstart/job.yaml"
TYPED = JOB.with_name("typed.yaml")
LEAST = 0.97


def run(output: Path, *arguments: str, job: Path = JOB) -> dict[str, object]:
    """Run `batchinfer run` with results in `output`, and return its report row."""
    words = ["run", str(job), "--json", "--set", f"output.path={output}", *arguments]
    command = [sys.executable, "-m", "batchinfer", *words]
    done = warm_commands.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    row: dict[str, object] = json.loads(done.stdout)
    return row


def accuracy(results: Path) -> tuple[int, int, float]:
    """Return (clean rows, bad rows that are error rows, share of clean rows that are exactly right)."""
    found = duckdb.sql(
        "SELECT count(*) FILTER (WHERE expected IS NOT NULL), "
        "count(*) FILTER (WHERE expected IS NULL AND status = 'error' AND error_code IS NOT NULL), "
        "avg((generated_text = expected)::INT) FILTER (WHERE expected IS NOT NULL), count(*) "
        f"FROM read_parquet('{results}/*.parquet')"
    ).fetchall()[0]
    clean, bad, right, rows = found
    assert clean + bad == rows, "every row is either clean or an error row"
    return clean, bad, right


# The job's first rows, with the minimum of clean rows, bad rows, duplicates and saved tokens
@pytest.mark.parametrize(("key", "least"), [
    ("input.limit=60", (60, 0, 0, 2_000)),
    pytest.param("input.limit=800", (790, 3, 30, 16_000), marks=pytest.mark.slow),
    pytest.param("model.dtype=float32", (2000, 8, 100, 50_000), marks=pytest.mark.slow),
    pytest.param("model.dtype=bfloat16", (2000, 8, 100, 50_000), marks=pytest.mark.slow),
])  # fmt: skip
def test_the_job_is_right(tmp_path, key, least):
    row = run(tmp_path / "quickstart", "--set", key)
    clean, bad, right = accuracy(tmp_path / "quickstart")
    print(f"{right:.2%} of {clean} rows, {row['dtype']}, {row['engine_s']:.1f} s in the engine")
    assert right >= LEAST
    found = (clean, bad, row["duplicate_rows"], row["prefix_saved_tokens"])
    assert all(one >= most for one, most in zip(found, least, strict=True)), found


@pytest.mark.slow
def test_with_a_schema_its_columns_have_types(tmp_path):
    """The columns contain the right answers' values."""
    output = tmp_path / "typed"
    row = run(output, "--set", "input.limit=60", job=TYPED)
    clean, _, right = accuracy(output)
    assert right >= LEAST
    assert row["constrained_requests"] == row["computed_requests"]
    assert row["forced_tokens"] >= 2 * clean  # two hyphens of each date
    assert 0 < row["mask_s"] < row["engine_s"]
    results = f"read_parquet('{output}/*.parquet')"
    columns = {name: str(kind) for name, kind, *_ in duckdb.sql(f"DESCRIBE FROM {results}").fetchall()}
    wanted = {"customer": "VARCHAR", "quantity": "BIGINT", "item": "VARCHAR", "due": "DATE"}
    assert {name: columns[name] for name in wanted} == wanted
    found = duckdb.sql(
        f"SELECT customer, due, sum(quantity) FROM {results} WHERE status = 'ok' GROUP BY ALL"
    ).fetchall()
    assert len(found) > clean / 2
    same = f"SELECT quantity, (generated_text->>'quantity')::BIGINT FROM {results} WHERE status = 'ok'"
    assert all(typed == text for typed, text in duckdb.sql(same).fetchall())


def test_both_jobs_ask_the_same():
    jobs = [YAML(typ="safe").load(path) for path in (JOB, TYPED)]
    for key in ("model", "input", "prompt", "sampling"):
        assert jobs[0][key] == jobs[1][key], key
    assert jobs[0]["output"]["path"] != jobs[1]["output"]["path"]
