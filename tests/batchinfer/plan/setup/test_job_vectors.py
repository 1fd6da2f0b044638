"""Vectors of a job, as the job and its checkpoint define them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.job import Job, load_job
from batchinfer.plan.setup.job_vectors import job_embedding
from tests.checkpoints import edit_json
from tests.sentence_checkpoints import PROMPTS, write_dense, write_modules

HIDDEN = 48


def job_of(folder: Path, source: str = "{text: t}", **embed: Any) -> Job:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(
        f"name: a\nmodel: {{path: m}}\ninput: {{path: a.jsonl}}\nprompt: {source}\noutput: {{path: out}}\n"
        f"task: embed\nembed: {json.dumps(embed)}\n"
    )
    return load_job(folder / "job.yaml")


def found(folder: Path, source: str = "{text: t}", **embed: Any) -> Embedding | None:
    return job_embedding(job_of(folder, source, **embed), HIDDEN)


def with_prompts(folder: Path, **more: Any) -> None:
    path = folder / "m" / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": PROMPTS, **more}))


def test_without_modules(tmp_path: Path) -> None:
    assert found(tmp_path) == Embedding("last", True, HIDDEN)
    assert job_embedding(job_of(tmp_path), HIDDEN, causal=False) == Embedding("mean", True, HIDDEN)
    assert found(tmp_path, pooling="mean", normalize=False, dimensions=7) == Embedding("mean", False, 7)
    with pytest.raises(JobFileError, match=r"embed\.dimensions: is 49.*1 to 48"):
        found(tmp_path, dimensions=49)
    with pytest.raises(JobFileError, match=r"embed\.prompt: 'query' is no prompt.*it has none"):
        found(tmp_path, prompt="query")


@pytest.mark.parametrize(("mode", "pooling"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_modules_set_the_pooling_if_the_job_does_not(tmp_path: Path, mode: str, pooling: Any) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", mode, normalizes=False)
    assert found(tmp_path) == Embedding(pooling, False, HIDDEN)
    assert found(tmp_path, pooling="last", normalize=True) == Embedding("last", True, HIDDEN)
    as_version_5 = {"pooling_mode": mode.removesuffix("_tokens")}
    (tmp_path / "m/1_Pooling/config.json").write_text(json.dumps(as_version_5))
    assert found(tmp_path) == Embedding(pooling, False, HIDDEN)


@pytest.mark.parametrize(("mode", "more", "words"), [
    ("cls_token", (), r"embed\.pooling: cls is the state of the first token, which in a decoder sees no other"),
    ("max_tokens", (), r"embed\.pooling: is not given.*max_tokens.*; last, mean and cls are"),
    ("weightedmean_tokens", (), r"embed\.pooling: is not given.*weightedmean_tokens"),
    ("lasttoken", ("Dense",), r"module Dense in the folder '2_Dense', which has no config\.json"),
    ("lasttoken", ("LayerNorm",), r"the module LayerNorm, which is not computed; Transformer, Pooling, Dense"),
    ("lasttoken", ("Normalize",), r"modules Transformer, Pooling, Normalize, Normalize; computed are"),
    ("none", (), r"its pooling has 0 modes"),
])  # fmt: skip
def test_modules_that_are_refused(tmp_path: Path, mode: str, more: tuple[str, ...], words: str) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", mode, True, *more)
    with pytest.raises(JobFileError, match=words):
        found(tmp_path)
    if mode == "cls_token":
        assert found(tmp_path, pooling="mean") == Embedding("mean", True, HIDDEN)
        assert job_embedding(job_of(tmp_path), HIDDEN, causal=False) == Embedding("cls", True, HIDDEN)


def test_dense_layers_after_the_pooling(tmp_path: Path) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", "mean_tokens")
    write_dense(tmp_path / "m", (HIDDEN, 20, 30), ("Tanh", "Identity"))
    made = found(tmp_path)
    layers = [(one.inputs, one.outputs, one.activation) for one in made.dense]
    assert layers == [(HIDDEN, 20, "Tanh"), (20, 30, "Identity")]
    assert (made.dimensions, Embedding.from_json(json.loads(json.dumps(made.to_json())))) == (30, made)
    assert "dense" not in Embedding("mean", True, HIDDEN).to_json(), (
        "otherwise stored results would be invalid"
    )
    with pytest.raises(JobFileError, match=r"is 31, and the model's vectors have 30 dimensions"):
        found(tmp_path, dimensions=31)
    with pytest.raises(JobFileError, match=r"takes vectors of 48 numbers, but its input vectors have 64"):
        job_embedding(job_of(tmp_path), 64)


@pytest.mark.parametrize(("changes", "words"), [
    ({"activation_function": "torch.nn.modules.activation.GELU"}, "its activation GELU is not computed"),
    ({"in_features": 47}, r"its weights are .*, and config\.json says"),
    ({"bias": False}, r"its weights are .*, and config\.json says"),
    ({"module_input_name": "token_embeddings"}, "its module_input_name is 'token_embeddings'; only"),
])  # fmt: skip
def test_layers_that_are_not_computed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", "mean_tokens")
    write_dense(tmp_path / "m", (HIDDEN, 20), ("Tanh",))
    edit_json(tmp_path / "m/2_Dense/config.json", **changes)
    with pytest.raises(JobFileError, match=f"module Dense in '2_Dense': {words}"):
        found(tmp_path)


def test_prompts(tmp_path: Path) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", "mean_tokens")
    with_prompts(tmp_path)
    assert found(tmp_path) == Embedding("mean", True, HIDDEN)
    assert found(tmp_path, prompt="query") == Embedding("mean", True, HIDDEN, "find: ")
    with pytest.raises(JobFileError, match=r"embed\.prompt: 'other' is no prompt.*it has query, document"):
        found(tmp_path, prompt="other")
    with_prompts(tmp_path, default_prompt_name="query")
    assert found(tmp_path) == found(tmp_path, prompt="query")
    assert found(tmp_path, prompt="none") == Embedding("mean", True, HIDDEN)
    assert found(tmp_path, "{token_ids: t}") == Embedding(
        "mean", True, HIDDEN
    )  # token ids get no text prompt
    pooling = tmp_path / "m/1_Pooling/config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    assert found(tmp_path, prompt="document") == Embedding("mean", True, HIDDEN)
    with pytest.raises(JobFileError, match=r"embed\.prompt: the checkpoint leaves its prompt's tokens out"):
        found(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", "[]", '[{"type": "x.Transformer", "path": "0"}, {"type": "Pooling"}]']
)
def test_damaged_modules_are_refused(tmp_path: Path, text: str) -> None:
    job_of(tmp_path)
    (tmp_path / "m/modules.json").write_text(text)
    with pytest.raises(JobFileError, match=r"modules\.json"):
        found(tmp_path)


def test_modules_may_not_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    job_of(tmp_path)
    write_modules(tmp_path / "m", "lasttoken")
    path = tmp_path / "m/modules.json"
    path.write_text(path.read_text().replace("1_Pooling", "../other"))
    with pytest.raises(SecurityRefusal, match="only files inside"):
        found(tmp_path)
