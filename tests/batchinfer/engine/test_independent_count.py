"""Tests that the FLOPs of a run equal torch's count over the eager model of transformers, with the same rows.

The pairs of query and key that a causal mask hides are subtracted. FLOPs per token are compared, too.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from batchinfer.core.request import Request
from batchinfer_kernels.cost import StepShape
from tests.batchinfer.engine.small_engine import (
    Limits,
    Noted,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    greedy,
    make_engine,
    make_runner,
)
from tests.kernels.gpu.pairs import each_first
from tests.model_costs import llama_cost

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
OUTPUT = 12
LIMITS = Limits(budget=96, blocks=400)


def rows(shared: bool) -> list[Request]:
    """Return prompts of different lengths; two thirds or none share a prefix."""
    rng = Random(3)
    beginning = [rng.randrange(250) for _ in range(45)]
    own = [[rng.randrange(250) for _ in range(rng.randrange(4, 60))] for _ in range(15)]
    prompts = [beginning + p if shared and i % 3 else p for i, p in enumerate(own)]
    return greedy(prompts, OUTPUT, ignore_eos=True)


def run(family: str, requests: list[Request]) -> Ran:
    model = checkpoint(family, **SIZES)
    engine = make_engine(make_runner(model, cpu_ops(model), LIMITS), LIMITS, frozenset())
    return drain(engine, requests)


def eager(family: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder(family, **SIZES),
        attn_implementation="eager",
        experts_implementation="eager",  # the counter does not know the grouped product
        dtype=torch.float32,
    )
    return model.eval()


def counted_flops(model: Any, prompt: list[int], answer: list[int], cached: int) -> int:
    """Return torch's FLOPs of a teacher-forced row without its last token.

    Args:
        cached: number of prompt tokens in the cache.
    """
    config = model.config
    heads, size = config.num_attention_heads, config.head_dim
    tokens = torch.tensor([prompt + answer[:-1]])
    past = DynamicCache(config=config)
    with torch.no_grad():
        if cached:
            model(tokens[:, :cached], past_key_values=past, logits_to_keep=1)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, cached:], past_key_values=past, logits_to_keep=len(answer))
    queries, keys = tokens.shape[1] - cached, tokens.shape[1]
    seen = sum(at + 1 for at in range(cached, keys))
    masked = queries * keys - seen
    return counter.get_total_flops() - 4 * config.num_hidden_layers * heads * size * masked


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "shared"), each_first(("llama", "qwen3_moe", "qwen2", "qwen3"), (False, True))
)
def test_flops_equal_the_count_of_torch(family: str, shared: bool) -> None:
    requests, model = rows(shared), eager(family)
    ran = run(family, requests)
    expected = sum(
        counted_flops(
            model,
            request.prompt.tolist(),
            ran.answers[request.key][0],
            ran.requests[request.key].cached_tokens,
        )
        for request in requests
    )
    assert any(sample.cached_tokens for sample in ran.requests.values()) == shared
    assert ran.total("flops") == pytest.approx(expected, rel=0.01)


def test_flops_of_preempted_work_count_once() -> None:
    """2 × weights per token, the head per sampled token, and 4 × heads × size per pair of query and key."""
    rng, model = Random(7), checkpoint("llama")
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(5, 70))] for _ in range(24)]
    limits = Limits(budget=64, blocks=45, scarce=True)
    noted = Noted(make_runner(model, cpu_ops(model), limits))
    ran = drain(make_engine(noted, limits, frozenset()), greedy(prompts, 40, ignore_eos=True))
    assert ran.total("preemptions") > 5, "nothing was forced"
    once = {token for step in noted.steps for token in step.tokens}
    pairs = len(model.spec.layers) * sum(at + 1 for _, at in once)
    dense = noted.cost.active_parameters * len(once)
    dense += noted.cost.head_parameters * sum(len(step.sampled) for step in noted.steps)
    attention = model.spec.attention
    assert ran.total("flops") == 2 * dense + 4 * pairs * attention.q_heads * attention.head_dim


def test_the_head_is_not_read_by_a_step_that_samples_nothing() -> None:
    model = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
    costs = model.step(StepShape(5, 0, 30, 10))
    unread = {name for name, cost in costs.items() if not cost.bytes}
    assert unread == {"final_norm", "lm_head", "sample", "copy_parts"}
