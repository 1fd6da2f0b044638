"""Runs whole jobs with encoders on a GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.killed_runs import REAL
from tests.batchinfer.pipeline.test_pipeline import run
from tests.batchinfer.test_embed_job import TEXTS, embeddings, write_job
from tests.examples import first_of
from tests.sentence_checkpoints import make_sentence_encoder
from tests.settings import has_gpus

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

INTERPRETED = RunOptions(engine="tests.batchinfer.engine.interpreted_gpu:build_quick")
# Steps of several prompts, of one prompt, and of prompts of one token
ENGINE = {"device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 70, "kv_memory": "1MiB"}
# One layer per kind, as the interpreter takes seconds for each
CASES = [
    ("modernbert", "cls_token", {"num_hidden_layers": 2, "global_attn_every_n_layers": 2}),
    ("gemma3_text", "mean_tokens", {"num_hidden_layers": 2}),
    ("bert", "mean_tokens", {"num_hidden_layers": 1}),
    ("mpnet", "mean_tokens", {"num_hidden_layers": 1}),
]


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the stand-in for a GPU if there is none."""
    if DEVICE == "cpu":
        has_gpus(monkeypatch)


@pytest.mark.parametrize(("family", "pooling", "layers"), first_of(CASES, 1))
def test_vectors_equal_a_cpus(tmp_path: Path, family: str, pooling: str, layers: dict[str, int]) -> None:
    """Two-sided windows, rotated positions with head norms, learned positions, and distances."""
    model, texts = tmp_path / "model", [*TEXTS[1:5:3], "a", "b" * 40]
    make_sentence_encoder(model, family, pooling, layers=layers)
    prompt = {"text": "text", "truncate": "right"}
    found = {}
    for device, options, engine in (("cpu", REAL, {"device": "cpu"}), ("cuda", INTERPRETED, ENGINE)):
        folder = tmp_path / device
        folder.mkdir()
        path = write_job(folder, model, texts, prompt=prompt, engine=engine)
        outcome = run(path, options)
        assert outcome.exit_code == 0
        found[device] = embeddings(path)
    assert (outcome.row["device"], dict(outcome.row["ops"])["decoder"]) == ("cuda", "triton")
    assert len(found["cpu"]) == len(texts)
    np.testing.assert_allclose(found["cuda"], found["cpu"], atol=1e-4)
