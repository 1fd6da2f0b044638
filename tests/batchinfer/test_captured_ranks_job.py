"""Tests ranks that capture steps with their collectives, without GPUs: Triton is interpreted and gloo
replaces NCCL."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchinfer.pipeline.options import RunOptions
from batchinfer.plan.setup import expert_places
from batchinfer.plan.setup.setting import Setting
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.medusa_heads import heads_of, save_heads
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_drafts_job import WEIGHTS, echoing
from tests.batchinfer.test_placed_experts_job import skewed_model
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, REAL, TENSOR
from tests.batchinfer.test_replicas import report
from tests.checkpoints import edit_json, make_model_folder
from tests.examples import first_of
from tests.settings import has_gpus

if importlib.util.find_spec("triton") is None or DEVICE == "cuda":
    pytest.skip("for machines with triton and without a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_memory": "1MiB"}
DRAFTING = replace(REAL, engine="tests.batchinfer.engine.interpreted_gpu:build_drafting")
ON_GPUS = replace(REAL, engine="tests.batchinfer.engine.interpreted_gpu:build_capturing_later")


def job(
    folder: Path, model: Path, texts: list[str], engine: dict[str, Any], drafts: Any = "off", **sampling: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    return write_job(
        folder, model, [{"text": text} for text in texts], drafts=drafts,
        prompt={"text": "text", "system": None, "user": None}, sampling={"ignore_eos": True, **sampling},
        engine=ENGINE | engine, model={"path": str(model), "max_model_len": 64},
    )  # fmt: skip


def alike(
    folder: Path, texts: list[str], options: RunOptions, sets: dict[str, int], drafts: Any, **sampling: Any
) -> tuple[Path, dict[str, Any]]:
    """Run the model on a CPU and on stand-in GPUs, and check that results are equal.

    Return the second job's file, and its row in the report.
    """
    alone = job(folder / "alone", folder / "model", texts, {"device": "cpu"}, **sampling)
    on_gpus = {"device": "cuda", "data_parallel": 1}
    path = job(folder / "ranks", folder / "model", texts, on_gpus, drafts, **sampling)
    run(alone, REAL, FLOAT32)
    row = run(path, options, FLOAT32, *((key, str(size)) for key, size in sets.items())).row
    assert table(path) == table(alone)
    assert (row["device"], row["worker_restarts"]) == ("cuda", 0)
    return path, row


@pytest.mark.slow
@pytest.mark.parametrize(("family", "division"), [("llama", TENSOR), ("mixtral", EXPERTS)])
def test_captured_steps_of_ranks_answer_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, division: str
) -> None:
    """Some captures happen during the job. All ranks run the collectives of each capture and each replay."""
    has_gpus(monkeypatch, "0", "1")
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    make_model_folder(tmp_path / "model", family, seed=2, num_hidden_layers=1, **experts)
    texts = [f"of all rows {n}" for n in range(5)]
    path, row = alike(tmp_path, texts, ON_GPUS, {division: 2}, "off", max_tokens=6)
    assert row["ranks"] == 2
    assert row["full_graph_steps"] > 0
    assert row["piecewise_graph_steps"] > 0
    assert row["eager_steps"] == 0  # pieces cover what is not captured as a whole, or not yet
    steps = report(path, "steps")
    assert any(step["capture_s"] > 0 for step in steps), "none was captured in mid-job"
    assert {step["collective_s"] for step in steps} == {None}, "no host waits for them"


@pytest.mark.slow
def test_captured_ranks_place_experts_by_their_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one process measures the counts. Each rank's graphs then use its experts, copies included."""
    has_gpus(monkeypatch, "0", "1")
    monkeypatch.setattr(Setting, "peaks", property(lambda _: None))  # only tokens count
    monkeypatch.setattr(expert_places, "_free_bytes", lambda *_: 1 << 24)  # of no GPU
    model, found = skewed_model(tmp_path / "model", "mixtral"), []
    for name, first, device, options, sets in (
        ("placed", 0, "cpu", REAL, ()),
        ("placed", 12, "cuda", ON_GPUS, ((EXPERTS, "2"),)),
        ("alone", 12, "cpu", REAL, ()),
    ):
        texts = [f"of all rows {n}" for n in range(first, first + 12)]
        path = job(tmp_path / name, model, texts, {"device": device}, max_tokens=6)
        found.append((run(path, options, FLOAT32, *sets).row, table(path)))
    (row, placed), (_, alone) = found[1:]
    assert placed == alone
    assert (row["device"], row["expert_placement"], row["worker_restarts"]) == ("cuda", "loads", 0)
    assert row["expert_copies"] > 0
    assert row["full_graph_steps"] > 0
    assert row["eager_steps"] == 0


@pytest.mark.parametrize("ranks", first_of([2, 1], 1))
def test_captured_steps_verify_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """All ranks have equal graphs: no rank waits for another one's capture."""
    has_gpus(monkeypatch, "0", "1")
    monkeypatch.setattr(Setting, "peaks", property(lambda _: Peaks(1e12, 1e9)))
    make_model_folder(tmp_path / "model", "llama", seed=2, num_hidden_layers=1)
    texts = [f"row {n} has some words, and row {n} has" for n in range(4 if ranks > 1 else 9)]
    bias = {"97": 40.0}
    path, row = alike(tmp_path, texts, DRAFTING, {TENSOR: ranks}, "auto", max_tokens=24, logit_bias=bias)
    assert (row["ranks"], row["heads_drafted"]) == (ranks, 0)
    assert row["accepted_tokens"] > 10
    assert row["piecewise_graph_steps"] > 0
    assert row["eager_steps"] == 0  # pieces cover what is not captured as a whole, or not yet
    steps = report(path, "steps")
    assert {step["collective_s"] for step in steps} == {None}, "no host waits for them"
    assert any(step["drafted_tokens"] and step["launch"] == "full_graph" for step in steps)
    assert any(step["drafted_tokens"] and step["capture_s"] > 0 for step in steps), (
        "none was captured in mid-job"
    )
    assert max(step["drafted_tokens"] for step in steps) <= 2 * 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_trees_are_verified_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Answers have two possible tokens per position: the right candidate of the heads alternates."""
    has_gpus(monkeypatch)
    monkeypatch.setattr(Setting, "peaks", property(lambda _: Peaks(1e12, 1e9)))
    make_model_folder(tmp_path / "model", "llama", seed=2, num_hidden_layers=2)
    heads = {"medusa": saying_both, "eagle": echoing}[kind](tmp_path / "model", tmp_path / "heads")
    if kind == "eagle":
        edit_json(heads / "config.json", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    texts = [f"row {n} has some words, and row {n} has" for n in range(3)]
    bias = dict.fromkeys(map(str, BOTH), 40.0)
    path, row = alike(tmp_path, texts, DRAFTING, {}, {"heads": str(heads)}, max_tokens=20, logit_bias=bias)
    assert row["eager_steps"] == 0
    assert row["heads_drafted"] > row["heads_accepted"] > 5
    steps = report(path, "steps")
    assert any(step["accepted_tokens"] and step["launch"] == "full_graph" for step in steps)


BOTH = (97, 98)


def saying_both(model: Path, folder: Path) -> Path:
    """Make three heads whose two most likely candidates both occur in answers."""
    weights = load_file(model / WEIGHTS)
    vocab, hidden = weights["model.embed_tokens.weight"].shape
    heads = heads_of(hidden, vocab, 3, 1)
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter.zero_()
            head[0].linear.bias[0] = 1000.0  # which is added to the state
            for token, logit in zip(BOTH, (1.0, 0.8), strict=True):
                head[-1].weight[token, 0] = logit
    return save_heads(folder, heads, 1)
