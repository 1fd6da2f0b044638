"""Tests the routing of tokens to experts, and their outputs, against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from batchinfer_kernels.cost import expected_hit
from batchinfer_kernels.experts import choose_experts, experts_reference
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.routing import Routing
from tests.kernels.refused import assert_refused

HIDDEN = 20


def deepseek_v3(**options: Any) -> DeepseekV3Config:
    return DeepseekV3Config(hidden_size=HIDDEN, num_local_experts=12, num_experts_per_tok=3, **options)


def routers() -> Any:
    """transformers' router, and an equal Routing."""
    mixtral = MixtralConfig(hidden_size=HIDDEN, num_local_experts=7, num_experts_per_tok=2)
    yield "mixtral", MixtralTopKRouter(mixtral), Routing(7, 2, normalised=True)
    for norm in (False, True):
        options = {"hidden_size": HIDDEN, "num_experts": 9, "num_experts_per_tok": 4, "norm_topk_prob": norm}
        yield f"qwen2-{norm}", Qwen2MoeTopKRouter(Qwen2MoeConfig(**options)), Routing(9, 4, normalised=norm)
        yield f"qwen3-{norm}", Qwen3MoeTopKRouter(Qwen3MoeConfig(**options)), Routing(9, 4, normalised=norm)
    gpt = GptOssConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=3)
    yield "gpt_oss", GptOssTopKRouter(gpt), Routing(8, 3, "softmax_of_chosen")
    for groups, chosen in ((1, 1), (4, 2)):
        limits = {"n_group": groups, "topk_group": chosen, "routed_scaling_factor": 2.5}
        rule = {"groups": groups, "chosen_groups": chosen, "scale": 2.5}
        method = "group_limited_greedy" if groups > 1 else "greedy"
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_experts": 12, "num_experts_per_tok": 3}
        v2 = DeepseekV2Config(**sizes, topk_method=method, **limits)
        yield f"deepseek_v2-{groups}", DeepseekV2TopkRouter(v2), Routing(12, 3, **rule)
        for norm in (False, True):
            v3 = DeepseekV3TopkRouter(deepseek_v3(norm_topk_prob=norm, **limits))
            more = {**rule, "normalised": norm, "corrected": True, "group_score": "top_two"}
            yield f"deepseek_v3-{groups}-{norm}", v3, Routing(12, 3, "sigmoid", **more)


@pytest.mark.parametrize(("router", "routing"), [pytest.param(*case[1:], id=case[0]) for case in routers()])
def test_routing_is_that_of_transformers(router: nn.Module, routing: Routing) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for values in (*router.parameters(), *router.buffers()):
            values.normal_()
        x = torch.randn(50, HIDDEN)
        _, weights, experts = router(x)
        logits = nn.functional.linear(x, router.weight, getattr(router, "bias", None))
        found = choose_experts(logits, routing, getattr(router, "e_score_correction_bias", None))
    order, wanted = experts.sort(1)
    ours, by_number = found.experts.sort(1)
    assert torch.equal(ours, order)
    torch.testing.assert_close(found.weights.gather(1, by_number), weights.gather(1, wanted))


@pytest.mark.parametrize("routing", [case[2] for case in routers()], ids=[case[0] for case in routers()])
def test_a_tokens_experts_do_not_depend_on_other_tokens(routing: Routing) -> None:
    torch.manual_seed(1)
    logits = torch.randn(70, routing.experts) * 3
    correction = torch.randn(routing.experts) if routing.corrected else None
    whole = choose_experts(logits, routing, correction)
    for first, last in ((0, 1), (69, 70), (3, 12), (1, 66)):
        part = choose_experts(logits[first:last], routing, correction)
        assert torch.equal(part.experts, whole.experts[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])


def test_experts_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=12, intermediate_size=9, num_local_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = MixtralExperts(config)
    with torch.no_grad():
        for values in theirs.parameters():
            values.normal_()
        x = torch.randn(40, 12)
        choice = choose_experts(torch.randn(40, 5), Routing(5, 2, normalised=True))
        wanted = theirs(x, choice.experts, choice.weights)
        got = experts_reference(x, theirs.gate_up_proj, theirs.down_proj, choice, "silu")
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_an_expert_without_rows_is_not_read() -> None:
    weight = torch.full((3, 4, 5), float("nan"))
    weight[1] = 1.0
    y = grouped_matmul_reference(torch.ones(2, 5), weight, torch.tensor([0, 0, 2, 2]))
    assert y.tolist() == [[5.0] * 4] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chosen": 9}, "9 of 8 experts"),
        ({"chosen": 2, "groups": 3}, "groups of 8 experts"),
        ({"chosen": 3, "groups": 4}, "too small"),
        ({"chosen": 1, "groups": 8, "group_score": "top_two"}, "too small"),
        ({"chosen": 1, "scoring": "softmax_of_chosen", "corrected": True}, "corrections"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    assert_refused(words, Routing, 8, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 4)}, "the weights are"),
        ({"weight": torch.zeros(3, 4, 5).half()}, "the weights are"),
        ({"weight": torch.zeros(3, 4, 5, dtype=torch.int8)}, "without scales"),
        ({"starts": torch.zeros(3).long()}, "there are 3 weights"),
        ({"bias": torch.zeros(3, 5)}, "bias is"),
        ({"weight": torch.zeros(3, 3, 5), "activation": "silu"}, "even number"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(2, 5), "weight": torch.zeros(3, 4, 5), "starts": torch.zeros(4).long()}
    assert_refused(words, grouped_matmul_reference, **{**arguments, **change})


def test_the_expected_number_of_experts() -> None:
    routing = Routing(60, 4)
    assert [expected_hit(n, 60, 4) for n in (0, 1, 2, 10_000)] == [0, 4, 8, 60]
    torch.manual_seed(0)
    found = [len(choose_experts(torch.randn(20, 60), routing).experts.unique()) for _ in range(200)]
    assert abs(sum(found) / len(found) - expected_hit(20, 60, 4)) < 1
