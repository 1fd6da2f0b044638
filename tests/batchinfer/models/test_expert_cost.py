"""What a model with experts costs: the arithmetic of those that a token uses, the memory of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchinfer.engine.schedule.budget import step_tokens
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.outliers import WatchedWeights
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.models.spec.spec import ExpertsSpec, FeedForwardSpec, ModelSpec
from batchinfer_kernels.cost import Peaks, StepShape, expected_hit
from batchinfer_kernels.routing import Routing
from tests.model_costs import llama_spec

HIDDEN, INNER, SHARED, EXPERTS, CHOSEN = 64, 48, 80, 10, 3
ATTENTION = HIDDEN * (4 * 16 + 2 * 2 * 16) + 4 * 16 * HIDDEN
EACH = 3 * HIDDEN * INNER
COMMON = ATTENTION + HIDDEN * EXPERTS + 3 * HIDDEN * SHARED + HIDDEN


def spec_of(layers: int = 2) -> ModelSpec:
    """Layers with experts between two that have none."""
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


def test_memory_is_that_of_all_experts() -> None:
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


def test_more_tokens_a_step_where_each_uses_few_weights() -> None:
    peaks = Peaks(430e9, 100e9)
    dense = model_cost(llama_spec(2, HIDDEN, INNER, 4, 2, 16, 100), 2)
    experts = model_cost(spec_of(30), 2)
    wanted = {cost: step_tokens(cost, peaks, 1, 0) for cost in (dense, experts)}
    assert wanted == {dense: 1024, experts: 2048}


def test_an_outlier_of_a_single_expert_is_seen() -> None:
    spec = spec_of()

    class Loud(DummyWeights):
        def layer(self, index: int) -> dict[str, torch.Tensor]:
            weights = dict(super().layer(index))
            if index == 1:
                weights["experts.gate_up"].view(EXPERTS, 2, INNER, HIDDEN)[7, 1, 5] *= 40
            return weights

    watched = WatchedWeights(Loud(spec, torch.float32, "cpu"), spec)
    for index in range(len(spec.layers)):
        watched.layer(index)
    assert watched.worst is not None
    assert (watched.worst.where, watched.worst.channel) == ("up projection of layer 1", 5)
    assert watched.worst.ratio > 30
