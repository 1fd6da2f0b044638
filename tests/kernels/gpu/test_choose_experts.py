"""Compares the choice of experts and the sorting of rows with references: all rules, ties, NaN, and one
token's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.experts import Choice, group_by_expert
from batchinfer_kernels.experts import choose_experts as reference
from batchinfer_kernels.gpu import sort_by_expert as sorting
from batchinfer_kernels.gpu.choose_experts import can_choose, choose_experts
from batchinfer_kernels.gpu.grouped_matmul import tile_ends
from batchinfer_kernels.gpu.sort_by_expert import HEIGHTS, LEAST_HEIGHT, sort_by_expert
from batchinfer_kernels.routing import Routing
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.matmul_cases import random
from tests.kernels.refused import assert_refused

RULES = [
    Routing(128, 8, normalised=True),  # Qwen3
    Routing(60, 4),  # Qwen2
    Routing(8, 2, "softmax_of_chosen", normalised=True, scale=1.5),
    Routing(5, 5, "sigmoid", normalised=True, corrected=True),
    Routing(64, 6, groups=8, chosen_groups=3, scale=16.0),  # DeepSeek-V2
    Routing(32, 4, "sigmoid", True, 2.5, corrected=True, groups=4, chosen_groups=2, group_score="top_two"),
]


def correction_of(routing: Routing) -> Tensor | None:
    return random(routing.experts, seed=9) if routing.corrected else None


@pytest.mark.parametrize("routing", RULES)
def test_a_choice_equals_the_reference(routing: Routing) -> None:
    wide = random(11, routing.experts + 3) * 3
    logits, correction = wide[:, : routing.experts], correction_of(routing)
    got, wanted = choose_experts(logits, routing, correction), reference(logits, routing, correction)
    assert torch.equal(got.experts, wanted.experts)
    torch.testing.assert_close(got.weights, wanted.weights)
    assert got.counts is not None
    assert got.counts.tolist() == torch.bincount(got.experts.flatten(), minlength=routing.experts).tolist()
    one = choose_experts(logits[4:5].contiguous(), routing, correction)
    assert torch.equal(one.experts, got.experts[4:5])
    assert torch.equal(one.weights, got.weights[4:5])


@pytest.mark.parametrize("routing", RULES)
def test_of_equal_experts_the_first_are_chosen(routing: Routing) -> None:
    logits = torch.zeros(2, routing.experts, device=DEVICE)
    correction = None if not routing.corrected else torch.zeros(routing.experts, device=DEVICE)
    logits[1, 1::2] = -0.0
    for row in choose_experts(logits, routing, correction).experts:
        assert row.tolist() == list(range(routing.chosen))


@pytest.mark.parametrize("routing", RULES)
def test_nan_reaches_the_weights(routing: Routing) -> None:
    """In the weights; the experts are existing ones, each once."""
    logits = random(3, routing.experts)
    logits[0] = float("nan")
    logits[1, routing.experts // 2] = float("nan")
    logits[2, 0] = float("-inf")
    found = choose_experts(logits, routing, correction_of(routing))
    assert found.weights.isnan().any(1).tolist() == [True, True, False]
    for row in found.experts.tolist():
        assert len(set(row)) == routing.chosen
        assert set(row) <= set(range(routing.experts))


def test_rules_that_no_kernel_knows_are_refused() -> None:
    for routing in (Routing(60, 4, groups=6, chosen_groups=2), Routing(2048, 4)):
        assert not can_choose(routing)
        assert_refused("cannot choose", choose_experts, random(2, routing.experts), routing)
    assert_refused("correction", choose_experts, random(2, 8), Routing(8, 2, corrected=True))


@pytest.mark.sample(4)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 1, 1), (9, 2, 5), (70, 6, 60), (130, 3, 128)])
def test_rows_are_sorted(
    tokens: int, chosen: int, experts: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more rows than a program reads at once, and experts without rows."""
    monkeypatch.setattr(sorting, "BLOCK", 128)
    used = max(chosen, experts // 2)
    choice = choose_experts(random(tokens, used), Routing(used, chosen))
    asked = Choice(choice.experts, choice.weights)
    loads, mask = torch.full((experts,), 7, device=DEVICE), torch.arange(tokens, device=DEVICE) % 3 > 0
    got = sort_by_expert(asked, loads, mask if counted else None)
    wanted = group_by_expert(choice.experts, experts)
    assert torch.equal(got.tokens, wanted.order // chosen)
    assert torch.equal(got.places, wanted.order.argsort())
    assert torch.equal(got.starts, wanted.starts)
    for power in range(HEIGHTS):
        height = LEAST_HEIGHT << power
        assert torch.equal(tile_ends(got.starts, height, got.ends), tile_ends(wanted.starts, height))
    seen = choice.experts[mask] if counted else choice.experts
    assert torch.equal(loads - 7, torch.bincount(seen.flatten(), minlength=experts))


def test_given_counts_are_used_unchanged() -> None:
    choice = choose_experts(random(40, 16), Routing(16, 4))
    counted, recounted = (torch.zeros(16, dtype=torch.int64, device=DEVICE) for _ in range(2))
    got = sort_by_expert(choice, counted)
    again = sort_by_expert(Choice(choice.experts, choice.weights), recounted)
    for name in ("tokens", "places", "starts", "ends"):
        assert torch.equal(getattr(got, name), getattr(again, name))
    assert torch.equal(counted, recounted)
    assert_refused("counts", sort_by_expert, choice, torch.zeros(17, dtype=torch.int64, device=DEVICE))


def test_no_tokens_at_all() -> None:
    choice = choose_experts(random(0, 16), Routing(16, 4))
    got = sort_by_expert(choice, torch.zeros(16, dtype=torch.int64, device=DEVICE))
    assert got.starts.tolist() == [0] * 17
    assert not got.ends.any()
