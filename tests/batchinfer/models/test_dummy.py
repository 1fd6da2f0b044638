"""Tests dummy weights: right shapes, equal each time, and a checkpoint on request."""

from __future__ import annotations

import pytest
import torch

from batchinfer.core.errors import UsageError
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.checkpoint.dummy import DummyWeights, write_checkpoint
from batchinfer.models.checkpoint.shapes import SHAPES, shape_config
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.spec.parameters import parameter_count

SMALL = {
    "llama": SHAPES["tiny"],
    "untied": {**SHAPES["tiny"], "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**SHAPES["tiny"], "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "stablelm, a norm for each head": {
        **{key: value for key, value in SHAPES["tiny"].items() if key != "head_dim"},
        "model_type": "stablelm",
        "architectures": ["StableLmForCausalLM"],
        "qk_layernorm": True,
    },
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_survive_writing_and_reading(tmp_path, name, dtype):
    """Another engine that loads the folder has exactly the weights of our run."""
    config = parse_config(SMALL[name], {}, tmp_path / "config.json")
    dummy = DummyWeights(config, dtype, "cpu", seed=3)
    write_checkpoint(tmp_path, SMALL[name], dummy)
    checkpoint = inspect_checkpoint(tmp_path)
    assert checkpoint.spec.hidden == config.hidden
    assert checkpoint.dtype == str(dtype).removeprefix("torch.")
    assert checkpoint.weight_bytes == parameter_count(config) * dtype.itemsize
    read = CheckpointWeights(checkpoint, dtype, "cpu")
    for index in range(len(config.layers)):
        ours, theirs = dummy.layer(index), read.layer(index)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for key in ("embedding", "head"):
        assert torch.equal(getattr(dummy.tables(), key), getattr(read.tables(), key))
    ours, theirs = dummy.tables().norms, read.tables().norms
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_tied_head_is_the_embedding():
    tables = DummyWeights(shape_config("tiny"), torch.float32, "cpu").tables()
    assert tables.head is tables.embedding


def test_layers_and_seeds_differ_and_asking_again_does_not():
    config = shape_config("tiny")
    dummy, other = (DummyWeights(config, torch.float32, "cpu", seed) for seed in (0, 1))
    assert torch.equal(dummy.layer(1)["qkv"], dummy.layer(1)["qkv"])
    assert not torch.equal(dummy.layer(0)["qkv"], dummy.layer(1)["qkv"])
    assert not torch.equal(dummy.layer(0)["qkv"], other.layer(0)["qkv"])
    assert dummy.layer(0)["o"].std().item() == pytest.approx(config.hidden**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-135m", 124.7), ("qwen2.5-0.5b", 494.0), ("llama-3.1-8b", 8030.3)]
)
def test_named_shapes_have_their_makers_sizes(name, millions):
    assert parameter_count(shape_config(name)) / 1e6 == pytest.approx(millions, abs=0.1)


def test_an_unknown_shape_is_named():
    with pytest.raises(UsageError, match="'gpt-5'; there are tiny"):
        shape_config("gpt-5")
