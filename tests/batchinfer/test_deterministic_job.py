"""A whole job with `engine.deterministic: true`: the published bytes do not depend on how the work was done."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from batchinfer import cli
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder

ROWS = [{"id": f"r{n}", "text": f"number {n} " * (n % 7)} for n in range(40)]
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
    """The command line in this process, engine and all."""
    words = [word for setting in settings for word in ("--set", setting)]
    assert cli._guarded(["run", str(place.folder / "job.yaml"), "--quiet", *words]) == 0


def published(place: Place) -> list[str]:
    """What is in the files; their names hold a number of their own for each publication."""
    files = sorted(place.results.glob("*.parquet"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize(
    ("first", "then"), [((), SLOWLY), pytest.param(SLOWLY, (), marks=pytest.mark.slow)], ids=["fast", "slow"]
)
def test_the_published_bytes_are_the_same(
    tmp_path: Path, model: Path, quantization: str, first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    """Sampled answers at a high temperature: the last bit of a logit would show sooner or later."""
    places = [make_place(tmp_path / name, model) for name in ("at-once", "grown")]
    for place in places:
        place.rows(*ROWS)
        place.job(
            model=f"model: {{path: model, dtype: bfloat16, quantization: {quantization}}}",
            sampling="sampling: {max_tokens: 24, temperature: 1.5, ignore_eos: true, logprobs: 3}",
            engine="engine: {deterministic: true}",
        )
    at_once, grown = places
    run(at_once)
    run(grown, "input.limit=13", *first)
    run(grown, *then)
    assert published(at_once) == published(grown)
    assert len({row["generated_text"] for row in at_once.table()}) > len(ROWS) // 2
