"""What steps say that they ran, beside a count of every single token that ran."""

from __future__ import annotations

import random

import pytest

from batchinfer_kernels.cost import ModelCost, StepShape
from tests.batchinfer.engine.small_engine import (
    Limits,
    Noted,
    checkpoint,
    cpu_ops,
    drain,
    greedy,
    make_engine,
    make_runner,
)
from tests.kernels.gpu.pairs import each_first
from tests.model_costs import llama_cost

LAYERS, OUTPUT = 2, 40
ATTENTION = checkpoint("llama").spec.attention
PROMPTS = 24


def prompts() -> list[list[int]]:
    """Half of them begin alike."""
    rng = random.Random(7)
    shared = [rng.randrange(250) for _ in range(60)]
    own = [[rng.randrange(250) for _ in range(rng.randrange(5, 70))] for _ in range(PROMPTS)]
    return [shared[: len(p)] + p[:9] if i % 2 else p for i, p in enumerate(own)]


def flops(cost: ModelCost, ran: set[tuple[bytes, int]], sampled: int) -> int:
    """2 × weights a token, the head for each sampled one, and 4 × heads × size for each pair of query and key."""
    pairs = LAYERS * sum(at + 1 for _, at in ran)
    dense = 2 * cost.active_parameters * len(ran) + 2 * cost.head_parameters * sampled
    return dense + 4 * pairs * ATTENTION.q_heads * ATTENTION.head_dim


@pytest.mark.parametrize(("budget", "caching"), each_first((11, 64, 300), (False, True)))
def test_preempted_work_counts_once_and_as_what_it_is(caching: bool, budget: int) -> None:
    model = checkpoint("llama")
    limits = Limits(budget=budget, blocks=45, caching=caching, scarce=True)
    noted = Noted(make_runner(model, cpu_ops(model), limits))
    rows = greedy(prompts(), OUTPUT, ignore_eos=True)
    ran = drain(make_engine(noted, limits, frozenset()), rows)
    tokens = [token for step in noted.steps for token in step.tokens]
    once, lengths = set(tokens), {r.key: len(r.prompt) for r in rows}
    assert ran.total("preemptions") > 5, "nothing was forced"
    assert ran.total("recomputed_tokens") == len(tokens) - len(once) > 0
    assert ran.total("prefill_tokens") + ran.total("decode_tokens") == len(tokens)
    assert ran.total("decode_tokens") == sum(at >= lengths[key] for key, at in once) == PROMPTS * (OUTPUT - 1)
    prompt = ran.total("prefill_tokens") - ran.total("recomputed_tokens")
    assert prompt == sum(at < lengths[key] for key, at in once)
    assert prompt + ran.total("cached_tokens") == sum(lengths.values())
    assert ran.total("cached_tokens") == sum(r.cached_tokens for r in ran.requests.values())
    assert (ran.total("cached_tokens") > 0) == caching
    assert ran.total("flops") == flops(noted.cost, once, sum(len(step.sampled) for step in noted.steps))


def test_a_step_that_only_recomputes_moves_nothing_of_use() -> None:
    model = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
    costs = model.step(StepShape(0, 0, 0, 0))
    assert {(c.flops, c.bytes) for c in costs.values()} == {(0, 0)}


def test_the_head_is_not_read_by_a_step_that_samples_nothing() -> None:
    model = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
    costs = model.step(StepShape(5, 0, 30, 10))
    unread = {name for name, cost in costs.items() if not cost.bytes}
    assert unread == {"final_norm", "lm_head", "sample", "copy_parts"}
