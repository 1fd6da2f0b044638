"""Tests that smoothing shrinks outlier channels without changing the model's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchinfer.models.adapters.factors import AdaptedWeights
from batchinfer.models.adapters.stored_adapter import inspect_adapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.smoothing import SmoothedWeights, factors_of
from batchinfer.models.checkpoint.weights import CheckpointWeights, Weights
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed_weights import pack_weights
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.models.paged import run_paged
from tests.checkpoints import make_checkpoint
from tests.lora_adapters import make_adapter

# Of each kind: dense, plain GPT with biased norms, parallel with one norm, experts and shared ones, latents, offsets
FAMILIES = ("llama", "llama with biases", "gpt2", "cohere", "qwen2_moe", "deepseek_v3", "gemma2")
LOUD, TIMES = [3, 11], 100.0
# Modules that adapters may change, by their names in all families
PRODUCTS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("c_attn", "c_proj", "c_fc", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
)


def loud(folder: Path, family: str) -> Checkpoint:
    """Return a checkpoint with two outlier channels in its norms and up projections."""
    name, _, biased = family.partition(" with ")
    make_checkpoint(folder, name, **({"mlp_bias": True} if biased else {}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name or ".ln_" in name:
            tensor[..., LOUD] *= TIMES
        if name.endswith(".bias"):
            tensor += 0.5
        if "up_proj" in name:
            tensor[5] *= TIMES
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return inspect_checkpoint(folder)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_function_stays_and_outliers_are_smaller(tmp_path: Path, family: str) -> None:
    """Also with an adapter of all products."""
    checkpoint, ops = loud(tmp_path / "model", family), TorchOps()
    coded, place = checkpoint.spec.quantized("int8"), (torch.float32, "cpu")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapter = inspect_adapter("own", make_adapter(tmp_path / "own", model, PRODUCTS), checkpoint)
    plain = AdaptedWeights(CheckpointWeights(checkpoint, *place), checkpoint.spec, [adapter], *place)
    smoothed = SmoothedWeights(plain, coded)

    def logits(weights: Weights, number: int) -> list[Tensor]:
        packed = pack_weights(checkpoint.spec, weights, ops, "cpu", adapters=1)
        decoder = Decoder(packed, ops, checkpoint.spec.max_positions)
        return run_paged(decoder, ops, [[1, 2, 3, 99], [7] * 20], adapter=number)

    found = [*logits(smoothed, 0), *logits(smoothed, 1)]
    asked = [*logits(plain, 0), *logits(plain, 1)]
    assert (asked[0] - asked[2]).abs().max() > 0.1, "an adapter changes much"
    for got, wanted in zip(found, asked, strict=True):
        if family == "gemma2":  # the offset is taken off again
            torch.testing.assert_close(got, wanted, atol=2e-3, rtol=1e-3)
        else:
            assert torch.equal(got, wanted)
    before, after = (largest_ratio(weights, checkpoint) for weights in (plain, smoothed))
    assert before > 3 * after
    untouched = SmoothedWeights(plain, checkpoint.spec)
    assert all(same(untouched.layer(at), plain.layer(at)) for at in range(len(checkpoint.spec.layers)))


def largest_ratio(weights: Weights, checkpoint: Checkpoint) -> float:
    """Return the largest ratio of a channel of a norm to the median channel."""
    layers = [weights.layer(at) for at in range(len(checkpoint.spec.layers))]
    sizes = [
        layer[name].float().abs() for layer in layers for name in ("input_norm", "post_norm") if name in layer
    ]
    return max(float(size.max() / size.median()) for size in sizes)


def same(ours: object, theirs: object) -> bool:
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def cases() -> Iterator[tuple[list[float], list[float], list[float] | None]]:
    even = [1.0, 1.0, 1.0, 1.0, 1.0]
    yield even, even, None
    yield [1, 1, 1, 1, 3.9], even, None
    yield [1, 1, 1, 1, 16], even, [1, 1, 1, 1, 4]
    yield [1, 1, 1, 1, 256], [1, 1, 1, 1, 1 / 256], [1, 1, 1, 1, 256]
    yield [1, 1, 1, 1, 256], [1, 1, 1, 1, 0], [1, 1, 1, 1, 256]  # an unread channel
    yield [1, 1, 1, 1, 16], [1, 1, 1, 1, 1024], [1, 1, 1, 1, 1]  # never larger
    yield [0, 0, 0, 0, 5], even, None


@pytest.mark.parametrize(("sizes", "weights", "factors"), list(cases()))
def test_factors(sizes: list[float], weights: list[float], factors: list[float] | None) -> None:
    found = factors_of(torch.tensor(sizes), torch.tensor(weights))
    assert (None if found is None else found.tolist()) == factors
