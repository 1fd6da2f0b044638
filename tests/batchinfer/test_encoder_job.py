"""Runs whole jobs with encoders, and compares them with transformers and torch's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.models.opening import open_checkpoint
from batchinfer.plan.forecast.job import forecast_job
from tests.batchinfer.killed_runs import REAL
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table
from tests.batchinfer.test_embed_job import TEXTS, embeddings, fenced, write_job
from tests.encoder_checkpoints import encoder_folder
from tests.sentence_checkpoints import densely, make_sentence_encoder, pooled_states, reference, write_dense


def test_vectors_equal_transformers(tmp_path: Path) -> None:
    """Truncated texts keep the tokens at both ends; the first one gives the vector."""
    model = tmp_path / "model"
    make_sentence_encoder(model, "bert")
    texts: list[Any] = [*TEXTS, TEXTS[3], None, "a" * 126, "a" * 200]
    prompt = {"text": "text", "truncate": "right"}
    path = write_job(tmp_path, model, texts, prompt=prompt)
    assert forecast_job(load_job(path), lambda _: None, lambda _: None).plan.shared_prefix_tokens == 0
    outcome = run(path, REAL)
    assert outcome.exit_code == 0
    assert (outcome.row["prefix_saved_tokens"], outcome.row["output_tokens"]) == (None, None)
    assert outcome.row["dimensions"] == embeddings(path).shape[1]
    wanted = reference(model, [*TEXTS, TEXTS[3], "a" * 126, "a" * 126], "cls_token")
    np.testing.assert_allclose(embeddings(path), wanted.numpy(), atol=1e-4)
    # two texts that are equal after truncation run once
    assert outcome.row["computed_requests"] == 31
    assert table(path)[-1]["prompt_tokens"] == 128
    write_job(tmp_path, model, texts[::-1], prompt=prompt)
    again = run(path, NO_ENGINE)
    assert again.exit_code == 0
    write_job(tmp_path, model, ["a" * 127], on_error={"max_error_rate": 1.0})
    run(path, REAL)
    assert table(path)[0]["error_code"] == "prompt_too_long"


@pytest.mark.slow
def test_layers_after_the_pooling(tmp_path: Path) -> None:
    """As in EmbeddingGemma: the store keeps the vectors before these layers, and a changed layer computes
    nothing."""
    model, kinds = tmp_path / "model", ("Identity", "Tanh")
    make_sentence_encoder(model, "gemma3_text", "mean_tokens", default_prompt_name="query")
    write_dense(model, (48, 80, 40), kinds)
    path = write_job(tmp_path, model, TEXTS[:12])
    assert run(path, REAL).exit_code == 0
    states = pooled_states(model, [f"find: {text}" for text in TEXTS[:12]], "mean_tokens")
    wanted = torch.nn.functional.normalize(densely(model, states, kinds), dim=1)
    np.testing.assert_allclose(embeddings(path), wanted.numpy(), atol=1e-4)
    write_dense(model, (48, 80, 40), kinds, biased=False)
    modules = json.loads((model / "modules.json").read_text())
    (model / "modules.json").write_text(json.dumps([*modules[:4], modules[-1]]))
    write_job(tmp_path, model, TEXTS[:12], embed={"dimensions": 7, "normalize": False})
    assert run(path, NO_ENGINE).exit_code == 0
    short = densely(model, states, kinds)[:, :7]
    np.testing.assert_allclose(embeddings(path), short.numpy(), atol=1e-4)


def test_the_job_of_the_page_runs(tmp_path: Path) -> None:
    make_sentence_encoder(tmp_path / "models/all-minilm-l6-v2", "bert", "mean_tokens")
    (tmp_path / "job.yaml").write_text(fenced("yaml", 1))
    (tmp_path / "articles.jsonl").write_text(fenced("json"))
    assert run(tmp_path / "job.yaml", REAL).exit_code == 0
    (file,) = (tmp_path / "results/faq").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    bodies = [json.loads(line)["body"] for line in fenced("json").splitlines()]
    wanted = reference(tmp_path / "models/all-minilm-l6-v2", bodies, "mean_tokens")
    np.testing.assert_allclose([row["embedding"] for row in rows], wanted.numpy(), atol=1e-4)


def refused(folder: Path, model: Path, **sections: Any) -> str:
    path = write_job(folder, model, ["a"], **sections)
    with pytest.raises(JobFileError) as caught:
        run(path, REAL)
    return str(caught.value)


def test_unsupported_options_of_encoders_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_sentence_encoder(model, "mpnet", "mean_tokens")
    said = refused(tmp_path, model, task="generate", sampling={"max_tokens": 4})
    assert "task: generate: the checkpoint is an encoder (model_type mpnet), which generates no texts" in said
    assert "use task: embed" in said
    said = refused(tmp_path, model, task="rerank")
    assert "without a classification head, and a cross-encoder has one" in said
    modules = model / "modules.json"
    modules.write_text(modules.read_text().replace("models.Normalize", "models.WeightedLayerPooling"))
    assert "has the module WeightedLayerPooling, which is not computed" in refused(tmp_path, model)


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ("bert", {"is_decoder": True}, "is_decoder is True; only false is supported"),
    ("mpnet", {"relative_attention_num_buckets": 16}, "num_buckets is 16; only 32 is supported"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings is 2; wanted more than 2"),
    ("bert", {"type_vocab_size": 3}, "tensors of a wrong shape: embeddings.token_type_embeddings.weight"),
])  # fmt: skip
def test_configurations_that_are_not_computed(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    for file in encoder_folder(family).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(JobFileError, match=words):
        open_checkpoint(tmp_path)
