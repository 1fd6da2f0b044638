"""Runs jobs whose ranks place experts by earlier counts: the first run measures, the second one places."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from batchinfer.job import load_job
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.plan.forecast.text import forecast_json, forecast_lines
from batchinfer.plan.setup.setting import Setting
from tests.batchinfer.pipeline.test_pipeline import people, run, write_job
from tests.batchinfer.test_ranks_job import EXPERTS, FEWER, FLOAT32, REAL, STAGES, TENSOR
from tests.batchinfer.test_replicas import report
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_cores

pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
MORE = 40
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 4},
}


def skewed_model(folder: Path, family: str) -> Path:
    """Make a model with one expert per token and similar hidden states: nearly all tokens choose one expert."""
    make_model_folder(folder, family, num_hidden_layers=2, num_experts_per_tok=1, **OF_EXPERTS[family])
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name, tensor in stored.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, 0] = 4 * tensor.abs().max()
    save_file(stored, file, metadata={"format": "pt"})
    return folder


def job(folder: Path, model: Path, rows: int) -> Path:
    folder.mkdir(exist_ok=True)
    found = [one | {"text": f"{one['text']} " * (1 + n % 7)} for n, one in enumerate(people(rows))]
    return write_job(
        folder, model, found, sampling={"max_tokens": 12, "temperature": 1.2, "logprobs": 1},
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 64, "deterministic": True},
    )  # fmt: skip


def published(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))]


@pytest.mark.parametrize(("family", "more"), first_of((
    ("mixtral", ()),
    ("gpt_oss", (("model.quantization", "int8"),)),
    ("qwen3_moe", (("model.quantization", "int8"),)),
    ("qwen3_moe", ()),
), 1))  # fmt: skip
def test_the_second_run_places_experts_and_keeps_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, more: tuple[tuple[str, str], ...]
) -> None:
    """The peaks are unknown: placement uses tokens. With a machine's peaks, reading weights may take an equal
    time."""
    monkeypatch.setattr(Setting, "peaks", property(lambda _: None))
    model, sets = skewed_model(tmp_path / "model", family), (FLOAT32, (EXPERTS, "2"), *more)
    path = job(tmp_path / "placed", model, FEWER)
    first = run(path, REAL, *sets).row
    assert (first["expert_placement"], first["expert_copies"]) == ("ranges", 0)
    assert first["expert_imbalance"] > 1.2
    job(tmp_path / "placed", model, MORE)
    planned = forecast_job(load_job(path, sets), lambda _: None, lambda _: None)
    told = forecast_json(planned, None)["experts"]
    assert told["placement"] == "loads"
    assert told["in_ranges"] == pytest.approx(first["expert_imbalance"])
    assert told["expected"] < 1.1
    assert any("placed by the loads of 1 earlier run" in line for line in forecast_lines(planned, None))
    kept = load_job(path, (*sets, ("engine.expert_placement", "ranges")))
    asked = forecast_job(kept, lambda _: None, lambda _: None).experts
    assert asked is not None
    assert (asked["placement"], asked["why"]) == ("ranges", "engine.expert_placement says so")
    second = run(path, REAL, *sets).row
    assert (second["expert_placement"], second["expert_copies"]) == ("loads", told["repeated"])
    assert second["expert_copies"] > 0
    assert second["expert_imbalance"] < 1.15
    assert second["rank_read_bytes"] > first["rank_read_bytes"]
    products = [linear for linear in inspect_checkpoint(model).spec.layers[0].linears if linear.experts]
    one = sum(linear.values // linear.experts for linear in products)
    copies = (second["rank_read_bytes"] - first["rank_read_bytes"]) / (4 * one)
    assert copies <= second["expert_copies"]  # a rank reads its share and its copies
    alone = job(tmp_path / "alone", model, MORE)
    row = run(alone, REAL, FLOAT32, *more).row
    assert row["expert_placement"] is None
    assert published(path) == published(alone)


@pytest.mark.parametrize("sizes", first_of([{STAGES: "2"}, {STAGES: "2", TENSOR: "2"}], 1), ids=str)
def test_all_stages_report_the_loads_of_their_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, str]
) -> None:
    """Counts have the layer numbers of the whole model; tensor ranks place whole experts, too."""
    has_cores(monkeypatch, 4)
    path = job(tmp_path / "staged", skewed_model(tmp_path / "model", "mixtral"), FEWER // 2)
    off = ("engine.deterministic", "false"), ("sampling.temperature", "0")
    row = run(path, REAL, FLOAT32, *off, *sizes.items()).row
    tokens = {(one["layer"], one["expert"]): one["tokens"] for one in report(path, "experts")}
    assert tokens.keys() == {(layer, expert) for layer in (0, 1) for expert in range(4)}
    of_layers = [sum(tokens[layer, expert] for expert in range(4)) for layer in (0, 1)]
    assert of_layers[0] == of_layers[1] > 0, "each token has one expert in each layer"
    assert row["expert_placement"] == ("ranges" if TENSOR in sizes else None)
