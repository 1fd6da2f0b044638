"""Runs whole jobs with `engine.deterministic: true`, with float and quantised caches.

The published bytes do not depend on chunks and batches, and the report counts the memory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from batchinfer import cli
from batchinfer_kernels.cpu.build import CODES, is_built, library_path
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder
from tests.examples import examples

ROWS = [{"id": f"r{n}", "text": f"number {n} " * (n % 7)} for n in range(examples(10, 40))]
SLOWLY = (
    "engine.max_num_seqs=2",
    "engine.max_num_batched_tokens=24",
    "engine.enable_prefix_caching=false",
    "engine.threads=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder, dtype=torch.bfloat16, seed=2)
    return folder


def run(place: Place, *settings: str) -> None:
    """Run the command line and its engine in this process."""
    words = [word for setting in settings for word in ("--set", setting)]
    assert cli._guarded(["run", str(place.folder / "job.yaml"), "--quiet", *words]) == 0


def published(place: Place) -> list[str]:
    """Return the content of the files; their names differ per publication."""
    files = sorted(place.results.glob("*.parquet"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def ask(place: Place, quantization: str, kept: str) -> None:
    """Set sampled answers at a high temperature, which reveal any changed bit of a logit."""
    place.job(
        model=f"model: {{path: model, dtype: bfloat16, quantization: {quantization}, kv_cache_dtype: {kept}}}",
        sampling="sampling: {max_tokens: 16, temperature: 1.5, ignore_eos: true, logprobs: 3}",
        engine="engine: {deterministic: true, data_parallel: 1}",
    )


def last(place: Place, table: str) -> list[dict[str, Any]]:
    """Read a table of the latest run's report."""
    files = (place.folder / "out" / "res-report").glob(f"{table}-*.parquet")
    return pq.read_table(max(files, key=lambda path: path.stat().st_mtime_ns)).to_pylist()


def moved(place: Place, layers: int) -> tuple[int, int]:
    """Return the bytes of all steps, and the number of times that a layer wrote or read a token's K and V."""
    steps = last(place, "steps")
    stored = sum(step["prefill_tokens"] + step["decode_tokens"] + 2 * step["copied_tokens"] for step in steps)
    return sum(step["bytes"] for step in steps), sum(step["kv_tokens"] for step in steps) + stored * layers


@pytest.mark.parametrize(("quantization", "kept", "first", "then"), [
    ("int8", "int8", SLOWLY, ()),
    *(pytest.param(quantization, "auto", *ways, marks=pytest.mark.slow) for quantization in ("none", "int8")
        for ways in ((SLOWLY, ()), ((), SLOWLY))),
])  # fmt: skip
def test_the_published_bytes_are_the_same(
    tmp_path: Path, model: Path, quantization: str, kept: str, first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    at_once, grown = (make_place(tmp_path / name, model) for name in ("at-once", "grown"))
    for place in (at_once, grown):
        place.rows(*ROWS)
        ask(place, quantization, kept)
    run(at_once)
    run(grown, "input.limit=7", *first)
    run(grown, *then)
    assert published(at_once) == published(grown)
    assert len({row["generated_text"] for row in at_once.table()}) > len(ROWS) // 2
    assert len(last(at_once, "requests")) == len(ROWS)
    assert len(last(grown, "requests")) == len(ROWS) - 7
    if kept == "int8":
        check_codes(at_once, grown, model)


def check_codes(at_once: Place, grown: Place, model: Path) -> None:
    """Check that the report names the quantised cache, whose answers differ from a job without it."""
    assert is_built(library_path(sources=CODES))
    assert last(at_once, "run")[0]["kv_cache_dtype"] == "int8"
    coded = published(grown)
    ask(grown, "int8", "auto")
    run(grown)
    assert len(last(grown, "requests")) == len(ROWS)
    assert published(grown) != coded
    config = json.loads((model / "config.json").read_text())
    dim, layers = config["hidden_size"] // config["num_attention_heads"], config["num_hidden_layers"]
    (few, touched), (many, as_often) = moved(at_once, layers), moved(grown, layers)
    assert touched == as_often
    # per value of K and V one byte instead of two, and per head a scale of four bytes
    assert many - few == touched * config["num_key_value_heads"] * 2 * (dim - 4)
