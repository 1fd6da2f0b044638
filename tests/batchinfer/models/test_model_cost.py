"""Tests the costs of a model's steps, including experts, and the kinds of its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchinfer.engine.schedule.budget import step_tokens
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.models.spec.spec import AttentionRules, AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec
from batchinfer_kernels.cost import Cost, Peaks, StepShape, expected_hit, step_total
from batchinfer_kernels.routing import Routing
from tests.model_costs import llama_spec

VOCAB, LAYERS = 100, 3
HIDDEN, INNER, SHARED, EXPERTS, CHOSEN = 64, 48, 80, 10, 3
ATTENTION = HIDDEN * (4 * 16 + 2 * 2 * 16) + 4 * 16 * HIDDEN
EACH = 3 * HIDDEN * INNER
COMMON = ATTENTION + HIDDEN * EXPERTS + 3 * HIDDEN * SHARED + HIDDEN


def test_multipliers_and_caps_are_counted() -> None:
    """Granite's and Gemma's multipliers of embeddings, of both halves of each layer, and of logits."""
    plain = llama_spec(LAYERS, HIDDEN, 48, 4, 2, 16, VOCAB)
    layers = tuple(replace(layer, residual_multiplier=0.22) for layer in plain.layers)
    spec = replace(plain, layers=layers, embedding_multiplier=12.0, logit_multiplier=0.1, logit_cap=30.0)
    step = StepShape(tokens=7, sampled=2, pairs=0, kv_tokens=0)
    more = step_total(model_cost(spec, 2).step(step)) - step_total(model_cost(plain, 2).step(step))
    hidden, logits = (1 + 2 * LAYERS) * 7 * HIDDEN, 2 * VOCAB
    assert more == Cost(hidden + (1 + 3) * logits, 2 * 2 * hidden + 2 * 2 * 4 * logits)
    bare = replace(layers[0], attention=None, input_norm=None)
    found = model_cost(replace(spec, layers=(*layers, bare)), 2).step(step)["residual_multiplier"]
    assert found.flops == (1 + 2 * LAYERS) * 7 * HIDDEN


def test_layers_are_counted_by_their_rules_and_cache_dtype() -> None:
    plain = llama_spec(3, 64, 48, 4, 2, 16, 100)
    first = plain.layers[0]
    assert isinstance(first.attention, AttentionSpec)
    local = replace(first, attention=replace(first.attention, window=8, soft_cap=30.0))
    bare = replace(first, attention=None, input_norm=None)
    spec = replace(plain, layers=(*plain.layers, local, bare))
    for kept, codes in (("auto", None), ("int8", "int8"), ("fp8", "fp8")):
        cached = spec.with_cache_dtype(kept)
        source = ModelSource(cached, 0, lambda *place, spec=cached: DummyWeights(spec, *place))
        assert source.prompt_layers == {
            AttentionRules(codes=codes): 3,
            AttentionRules(8, 30.0, codes=codes): 1,
        }


def spec_of(layers: int = 2) -> ModelSpec:
    """Return a spec with expert layers between two dense ones."""
    model = llama_spec(1, HIDDEN, INNER, 4, 2, 16, 100)
    shared = FeedForwardSpec(SHARED, "silu")
    experts = ExpertsSpec(Routing(EXPERTS, CHOSEN), INNER, "silu", shared=shared, shared_gated=True)
    layer = replace(model.layers[0], feed_forward=experts)
    return replace(model, layers=(*model.layers, *(layer,) * layers, *model.layers))


def tokens(count: int) -> StepShape:
    return StepShape(count, 0, 0, 0)


def test_parameters_that_a_token_multiplies() -> None:
    cost, dense = model_cost(spec_of(), 2), ATTENTION + EACH
    assert cost.parameters == 2 * dense + 2 * (COMMON + EXPERTS * EACH)
    assert cost.active_parameters == 2 * dense + 2 * (COMMON + CHOSEN * EACH)
    assert cost.model_flops(tokens(7)) == 2 * 7 * cost.active_parameters


def test_memory_includes_all_experts() -> None:
    cost, spec = model_cost(spec_of(), 2), spec_of()
    norms, tables = 9 * HIDDEN, 2 * 100 * HIDDEN
    assert parameter_count(spec) == cost.parameters + norms + tables


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_a_step_reads_the_experts_that_have_tokens(count: int) -> None:
    operators, hit = model_cost(spec_of(), 2).step(tokens(count)), expected_hit(count, EXPERTS, CHOSEN)
    assert hit == {1: 3, 2: 5, 5: 8, 1000: 10}[count]
    rows = CHOSEN * count
    first, second = operators["experts.gate_up"], operators["experts.down"]
    assert first.flops == 2 * rows * HIDDEN * 2 * INNER * 2
    assert first.bytes == 2 * 2 * (hit * HIDDEN * 2 * INNER + count * HIDDEN + rows * 2 * INNER)
    assert second.flops == 2 * rows * INNER * HIDDEN * 2
    assert second.bytes == 2 * 2 * (hit * INNER * HIDDEN + rows * INNER + rows * HIDDEN)
    assert operators["activation"].flops == 5 * count * (2 * INNER + 2 * (CHOSEN * INNER + SHARED))


def test_one_step_more_reads_the_experts_of_a_token_at_least() -> None:
    again = model_cost(spec_of(), 2).another_step()
    assert again["experts.down"].bytes == 2 * 2 * CHOSEN * INNER * HIDDEN
    assert again["qkv"].bytes == 4 * 2 * HIDDEN * 128


def test_int8_leaves_the_router_as_it_is() -> None:
    plain, coded = (model_cost(spec_of().quantized(name), 2).step(tokens(4)) for name in ("none", "int8"))
    assert coded["router"] == plain["router"]
    assert coded["shared_gate"] == plain["shared_gate"]
    for name in ("experts.gate_up", "experts.down", "shared.down"):
        assert coded[name].coded_ops == plain[name].flops
        assert coded[name].bytes < plain[name].bytes


def test_steps_have_more_tokens_if_each_uses_few_weights() -> None:
    peaks = Peaks(430e9, 100e9)
    dense = model_cost(llama_spec(2, HIDDEN, INNER, 4, 2, 16, 100), 2)
    experts = model_cost(spec_of(30), 2)
    wanted = {cost: step_tokens(cost, peaks, 1, 0) for cost in (dense, experts)}
    assert wanted == {dense: 1024, experts: 2048}
