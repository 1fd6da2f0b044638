"""Tests calibration of experts: the tokens that each expert is rounded for, the gain, and unchanged weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.models.calibration import experts
from batchinfer.models.calibration.experts import SeenTokens, WatchedExperts, round_experts
from batchinfer.models.calibration.layer import LayerInputs, round_layer
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.ops.layers import Experts
from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, NormSpec
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.routing import Routing
from tests.batchinfer.models.test_calibrated_folder import SIZES, calibrate
from tests.checkpoints import make_checkpoint
from tests.packed_weights import SINGLE

HIDDEN, INNER, COUNT, GROUP, TOKENS = 64, 96, 3, 32, 400
LAYER = LayerSpec(HIDDEN, None, None, None, ExpertsSpec(Routing(COUNT, 1), INNER, "silu", biased=True))
NAMES = ("experts.gate_up", "experts.down")
Inputs = list[Tensor]


def layer_weights(seed: int = 0) -> dict[str, Tensor]:
    """Return random weights whose up projections have outlier channels."""
    torch.manual_seed(seed)
    ups = torch.randn(COUNT, 2 * INNER, HIDDEN)
    ups[:, INNER + 5] *= 12
    return {
        "router": torch.randn(COUNT, HIDDEN),
        "experts.gate_up": ups.flatten(0, 1),
        "experts.gate_up.bias": torch.randn(COUNT * 2 * INNER),
        "experts.down": torch.randn(COUNT * HIDDEN, INNER),
        "experts.down.bias": torch.randn(COUNT * HIDDEN),
    }


def tokens_of_experts() -> Inputs:
    """Return inputs where each expert's tokens are close to its own few directions."""
    torch.manual_seed(1)
    return [
        torch.randn(TOKENS, 8) @ torch.randn(8, HIDDEN) + 0.1 * torch.randn(TOKENS, HIDDEN)
        for _ in range(COUNT)
    ]


def seen_of(inputs: Inputs, order: list[int]) -> SeenTokens:
    """Return the seen tokens.

    Args:
        order: expert of each input.
    """
    numbers = torch.tensor(order).repeat_interleave(TOKENS)[:, None]
    return SeenTokens(COUNT, torch.cat(inputs), numbers, torch.rand(len(numbers), 1) + 0.5)


def outputs(weights: dict[str, Tensor], number: int, x: Tensor) -> Tensor:
    """Return an expert's outputs, from float weights or from quantised values with scales."""

    def own(name: str) -> Tensor:
        found = weights[name].float()
        if name + ".scales" in weights:
            found = found * weights[name + ".scales"].repeat_interleave(GROUP, 1)
        return found.view(COUNT, -1, *found.shape[1:])[number]

    both = x @ own("experts.gate_up").T + own("experts.gate_up.bias")
    return gated_activation_reference(both, "silu") @ own("experts.down").T + own("experts.down.bias")


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(weights)
    for name in NAMES:
        found[name], found[name + ".scales"] = quantize_groups(weights[name], GROUP)
    return found


def calibrated(seen: SeenTokens) -> dict[str, Tensor]:
    found = layer_weights()
    round_experts(LAYER, found, seen, GROUP, torch.float32)
    return found


def errors(found: dict[str, Tensor], inputs: Inputs) -> Tensor:
    exact = layer_weights()
    return torch.stack(
        [(outputs(found, e, x) - outputs(exact, e, x)).square().mean() for e, x in enumerate(inputs)]
    )


class Doubling(Experts):
    """Experts that only have a number."""

    loads = torch.zeros(3, dtype=torch.int64)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        return 2 * x


def test_inputs_of_experts_are_kept_for_counted_tokens() -> None:
    counted = [torch.tensor([True, False, True]), torch.tensor([False, True])]
    watched = WatchedExperts(Doubling(), iter(counted))
    for first, tokens in ((0, 3), (3, 2)):
        x = torch.arange(first, first + tokens).float()[:, None]
        assert torch.equal(watched(x, Choice(x.long() % 3, x / 10)), 2 * x)
    seen = watched.seen
    assert (seen.count, seen.x.flatten().tolist()) == (3, [0, 2, 4])
    assert seen.experts.flatten().tolist() == [0, 2, 1]
    assert torch.equal(seen.weights, seen.x / 10)


def test_each_expert_is_rounded_for_its_own_tokens() -> None:
    inputs = tokens_of_experts()
    own, others = calibrated(seen_of(inputs, [0, 1, 2])), calibrated(seen_of(inputs, [1, 2, 0]))
    plain = errors(rounded(layer_weights()), inputs)
    assert (errors(own, inputs) < 0.3 * plain).all()
    assert (errors(own, inputs) < 0.5 * errors(others, inputs)).all()
    biases = layer_weights()["experts.gate_up.bias"].view(COUNT, 2, INNER)
    changed = own["experts.gate_up.bias"].view(COUNT, 2, INNER)
    assert torch.equal(biases[:, 0], changed[:, 0])
    assert all((changed[e, 1] != biases[e, 1]).any() for e in range(COUNT))


def test_channels_before_the_router_are_scaled_for_all_experts() -> None:
    """The changed norm followed by the changed experts gives nearly the same outputs."""
    layer = replace(LAYER, post_norm=NormSpec(HIDDEN, 1e-6))
    loud = torch.ones(HIDDEN)
    loud[::7] = 30.0
    normed = tokens_of_experts()
    inputs, weights = [one * loud for one in normed], layer_weights() | {"post_norm": loud}
    weights["router"] = weights["router"] / loud
    seen = seen_of(inputs, [0, 1, 2])
    after = dict(round_layer(layer, weights, LayerInputs({}, seen), GROUP, torch.float32).weights)
    factors = loud / after["post_norm"]
    assert len(factors.unique()) > 1
    changed = [x * after["post_norm"] for x in normed]
    exact = [outputs(layer_weights(), e, x) for e, x in enumerate(inputs)]
    plain = [outputs(rounded(layer_weights()), e, x) for e, x in enumerate(inputs)]
    for e, wanted in enumerate(exact):
        assert (outputs(after, e, changed[e]) - wanted).norm() < 0.35 * (plain[e] - wanted).norm()


def test_a_token_is_weighted_by_its_result() -> None:
    inputs = tokens_of_experts()
    loud, quiet = torch.full((TOKENS, 1), 1.0), torch.full((TOKENS, 1), 0.02)
    first, last = (
        calibrated(replace(seen_of(inputs, [0, 0, 1]), weights=torch.cat(weights)))
        for weights in ((loud, quiet, loud), (quiet, loud, loud))
    )
    assert errors(first, inputs)[0] < 0.5 * errors(last, inputs)[0]


def test_experts_are_rounded_equally_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of(tokens_of_experts(), [0, 1, 2])
    together = calibrated(seen)
    monkeypatch.setattr(experts, "BYTES_AT_ONCE", 1)
    alone = calibrated(seen)
    for name in NAMES:
        assert (alone[name] == together[name]).float().mean() > 0.999
        assert torch.equal(alone[name + ".scales"], together[name + ".scales"])


def test_an_expert_with_few_tokens_gets_the_tokens_that_its_router_prefers() -> None:
    torch.manual_seed(2)
    tokens, few, least = 700, 5, experts.MIN_EXPERT_TOKENS
    seen = SeenTokens(
        3,
        torch.arange(float(tokens))[:, None],
        torch.tensor([[1, 0]] * 3 + [[0, 1]] * 2 + [[0, 2]] * (tokens - few)),
        torch.tensor([[0.75, 0.25]] * tokens),
    )
    preferred = torch.zeros(tokens, 3)
    preferred[:, 1] = torch.rand(tokens) / 4
    x, weights = seen.of(1, preferred)
    assert len(x) == least
    assert x[:few, 0].tolist() == [0, 1, 2, 3, 4]
    assert weights[:few].tolist() == [0.75] * 3 + [0.25] * 2
    others = x[few:, 0].long()
    assert set(others.tolist()) == set((preferred[few:, 1].topk(least - few).indices + few).tolist())
    assert torch.equal(weights[few:], preferred[others, 1])
    assert len(seen.of(0, preferred)[0]) == tokens
    assert seen.of(2, preferred)[1].tolist() == [0.25] * (tokens - few)
    assert seen.few == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_choice_of_experts_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Channels before router and experts are divided by powers of two, if the checkpoint's dtype can store
    the results. A float16 near its minimum cannot."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    make_checkpoint(tmp_path / "plain", "qwen2_moe", dtype=dtype, **SIZES, **sizes)
    stored = load_file(tmp_path / "plain" / SINGLE)
    for name, tensor in stored.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:, 7] = 5.1e-6 * torch.randn(len(tensor))
        if name.endswith("post_attention_layernorm.weight"):
            tensor[::8] *= 3.5
            tensor[7] = 0.01
    save_file(stored, tmp_path / "plain" / SINGLE, metadata={"format": "pt"})
    layers, _ = calibrate(tmp_path / "plain", tmp_path / "int4")
    before = CheckpointWeights(inspect_checkpoint(tmp_path / "plain"), torch.float32, "cpu")
    after = CheckpointWeights(inspect_checkpoint(tmp_path / "int4"), torch.float32, "cpu")
    factors = []
    for index in range(len(layers)):
        old, new = before.layer(index), after.layer(index)
        factor = old["post_norm"] / new["post_norm"]
        assert (factor.frexp().mantissa == 0.5).all()
        x = torch.randn(50, SIZES["hidden_size"])
        for name in ("router", "shared_gate"):
            assert torch.equal(new[name], old[name] * factor)
            made = [(x * each["post_norm"]) @ each[name].T for each in (old, new)]
            assert torch.equal(*made)
        factors.append(factor)
    found = torch.stack(factors)
    assert len(found.unique()) >= 3
    assert bool((found[:, 7] == 1).all()) == (dtype == torch.float16)
