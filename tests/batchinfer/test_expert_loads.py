"""Tests the report's counts of tokens per expert, in a whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.batchinfer.test_deterministic_job import run
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder

ROWS = [{"id": f"r{n}", "text": f"number {n} " * (n % 5 + 1)} for n in range(12)]
EXPERTS, CHOSEN = 7, 3


def place_of(folder: Path, family: str, **options: Any) -> Place:
    make_model_folder(folder / "checkpoint", family, seed=2, **options)
    place = make_place(folder / "job", folder / "checkpoint")
    place.rows(*ROWS)
    place.job(
        model="model: {path: model, dtype: float32}", sampling="sampling: {max_tokens: 9, ignore_eos: true}"
    )
    return place


def report(place: Place, table: str) -> str:
    (path,) = place.folder.rglob(f"{table}-*Z-*.parquet")
    return f"'{path}'"


def test_every_token_has_its_experts(tmp_path: Path) -> None:
    place = place_of(tmp_path, "qwen2_moe", num_hidden_layers=3, mlp_only_layers=[1])
    run(place)
    experts = duckdb.sql(f"FROM {report(place, 'experts')}")
    assert experts.columns == ["run_id", "layer", "expert", "tokens", "load"]
    ran = "sum(prefill_tokens + decode_tokens)"
    (tokens,) = duckdb.sql(f"SELECT {ran}::BIGINT FROM {report(place, 'steps')}").fetchall()[0]
    of_layers = duckdb.sql(
        "SELECT layer, sum(tokens), count(*), avg(load) FROM experts GROUP BY 1 ORDER BY 1"
    )
    found = of_layers.fetchall()
    assert [row[:3] for row in found] == [(layer, CHOSEN * tokens, EXPERTS) for layer in (0, 2)]
    assert [row[3] for row in found] == pytest.approx([1, 1])
    assert duckdb.sql("SELECT count(DISTINCT tokens) FROM experts").fetchall()[0][0] > EXPERTS
