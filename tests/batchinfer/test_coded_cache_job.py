"""A whole job with `model.kv_cache_dtype: int8` on the CPU: results, carrying on, keys, and what the report counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from batchinfer_kernels.cpu.build import CODES, is_built, library_path
from tests.batchinfer.test_deterministic_job import ROWS, SLOWLY, published, run
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder, dtype=torch.bfloat16, seed=2)
    return folder


def ask(place: Place, kept: str) -> None:
    place.job(
        model=f"model: {{path: model, dtype: bfloat16, kv_cache_dtype: {kept}}}",
        sampling="sampling: {max_tokens: 24, temperature: 1.5, ignore_eos: true, logprobs: 3}",
        engine="engine: {deterministic: true, data_parallel: 1}",
    )


def last(place: Place, table: str) -> list[dict[str, Any]]:
    """Of the latest run's report."""
    files = (place.folder / "out" / "res-report").glob(f"{table}-*.parquet")
    return pq.read_table(max(files, key=lambda path: path.stat().st_mtime_ns)).to_pylist()


def moved(place: Place, layers: int) -> tuple[int, int]:
    """Bytes of all steps, and how many times a layer wrote or read a token's K and V; a copy does both."""
    steps = last(place, "steps")
    stored = sum(step["prefill_tokens"] + step["decode_tokens"] + 2 * step["copied_tokens"] for step in steps)
    return sum(step["bytes"] for step in steps), sum(step["kv_tokens"] for step in steps) + stored * layers


def test_a_job_with_codes_in_its_cache(tmp_path: Path, model: Path) -> None:
    at_once, grown = (make_place(tmp_path / name, model) for name in ("at-once", "grown"))
    for place in (at_once, grown):
        place.rows(*ROWS)
        ask(place, "int8")
    run(at_once)
    run(grown, "input.limit=13", *SLOWLY)
    run(grown)
    coded = published(grown)
    assert coded == published(at_once)
    assert is_built(library_path(sources=CODES))
    (report,) = last(at_once, "run")
    assert report["kv_cache_dtype"] == "int8"
    assert len(last(at_once, "requests")) == len(ROWS)
    assert len(last(grown, "requests")) == len(ROWS) - 13

    ask(grown, "auto")  # answers from codes are not this job's
    run(grown)
    assert len(last(grown, "requests")) == len(ROWS)
    assert published(grown) != coded
    config = json.loads((model / "config.json").read_text())
    dim, layers = config["hidden_size"] // config["num_attention_heads"], config["num_hidden_layers"]
    (few, touched), (many, as_often) = moved(at_once, layers), moved(grown, layers)
    assert touched == as_often
    # K and V of each head: of every value one byte instead of two, and a scale of four
    assert many - few == touched * config["num_key_value_heads"] * 2 * (dim - 4)
