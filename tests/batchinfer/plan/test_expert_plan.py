"""Placements of experts on ranks: when they differ from ranges, and when copies are faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchinfer.models.parallel.expert_placement import rank_loads, split_into_ranges
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import ExpertsSpec, ModelSpec
from batchinfer.plan.expert_plan import has_experts, plan_experts
from batchinfer.plan.forecast.sharded_model import with_imbalance
from batchinfer.plan.forecast.text import experts_text
from batchinfer.report.tables.earlier_runs import EarlierExperts
from batchinfer_kernels.cost import Peaks, StepShape
from batchinfer_kernels.routing import Routing
from tests.model_costs import llama_spec

EXPERT_BYTES = 3 * 64 * 128 * 4
PLENTY = 100 * EXPERT_BYTES
HOT = [700, 100, 50, 50, 25, 25, 25, 25]
FAST_MEMORY, FAST_PRODUCTS = Peaks(1e9, 1e15), Peaks(1e18, 1e9)


def spec_of(layers: int = 3, chosen: int = 1) -> ModelSpec:
    """Return a model whose layers after the first have 8 experts each."""
    spec = llama_spec(layers, 64, 128, 4, 2, 16, vocab=100)
    routed = ExpertsSpec(Routing(8, chosen), 128, "silu")
    with_experts = (replace(each, feed_forward=routed) for each in spec.layers[1:])
    return replace(spec, layers=(spec.layers[0], *with_experts))


def history(tokens: list[int], steps: int = 1000) -> EarlierExperts:
    return EarlierExperts(2, {1: np.array(tokens), 2: np.array(tokens)}, np.full(20, steps))


@pytest.mark.parametrize("peaks", [None, FAST_MEMORY])
def test_hot_experts_are_repeated_where_there_is_room(peaks: Peaks | None) -> None:
    spec = spec_of()
    found = plan_experts(spec, 2, history(HOT), peaks, 4, PLENTY)
    assert found.placement.layers[0] == ()
    assert found.in_ranges == pytest.approx(1.8)
    assert found.expected < 1.05
    assert found.repeated >= 2
    for layer in (1, 2):
        assert sum(rank_loads(found.placement.layers[layer], HOT)) == sum(HOT)
    assert found.imbalance({1: HOT, 2: HOT}) == pytest.approx(found.expected)
    assert found.imbalance({1: [1] * 8, 2: [1] * 8}) > 1
    text = f"1.80 times the mean's tokens with ranges, and {found.expected:.2f} times as placed"
    assert text in experts_text(**found.facts)


def test_copies_stay_within_their_memory() -> None:
    spec = spec_of()
    none = plan_experts(spec, 2, history(HOT), None, 4, 2 * EXPERT_BYTES - 1)
    assert (none.repeated, none.placement) == (0, none.placement)
    found = plan_experts(spec, 2, history(HOT), None, 4, 2 * EXPERT_BYTES)
    assert all(len(share) <= 5 for shares in found.placement.layers for share in shares)
    assert 1 <= found.repeated <= 4
    assert plan_experts(spec, 2, history(HOT), None, 4, -1).repeated == 0


def test_experts_are_not_copied_if_reading_them_dominates() -> None:
    """With slow memory, all experts are read anyway, and ranges are as good as any placement."""
    found = plan_experts(spec_of(), 2, history(HOT, 100_000), FAST_PRODUCTS, 4, PLENTY)
    assert (found.placement, found.repeated) == (None, 0)
    assert found.in_ranges == found.expected == pytest.approx(1.8)
    assert experts_text(**found.facts) == (
        "in ranges: by the loads of 2 earlier runs no placement is faster; "
        "the most loaded of 2 ranks has 1.80 times the mean's tokens"
    )
    assert plan_experts(spec_of(), 2, history([9] * 8), None, 4, PLENTY).placement is None


def test_rarely_read_experts_count_for_less() -> None:
    """With two tokens per step, one or both use the hot expert."""
    found = plan_experts(spec_of(), 2, history(HOT, 2), FAST_PRODUCTS, 4, 0)
    assert found.placement.layers[1] != split_into_ranges(8, 2)


def test_a_history_of_another_model_is_none() -> None:
    assert has_experts(spec_of(), history(HOT))
    assert not has_experts(spec_of(layers=4), history(HOT))
    assert not has_experts(spec_of(), history(HOT[:7]))


def test_the_fullest_rank_computes_as_many_more_tokens_and_reads_as_many_weights() -> None:
    cost = model_cost(spec_of(), 4)
    more = with_imbalance(cost, 1.5)
    shape = StepShape(1000, 0, 0, 0)
    even, uneven = cost.step(shape), more.step(shape)
    for operator, of in even.items():
        if operator.startswith("experts."):
            assert uneven[operator].flops == pytest.approx(1.5 * of.flops)
            assert uneven[operator].bytes < 1.5 * of.bytes
        else:
            assert uneven[operator] == of
