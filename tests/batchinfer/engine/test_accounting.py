"""The costs of a run and of a step, beside a count of every single token that ran."""

from __future__ import annotations

import random

from batchinfer_kernels.cost import StepShape
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
from tests.model_costs import llama_cost


def test_flops_of_preempted_work_count_once() -> None:
    """2 × weights a token, the head for each sampled one, and 4 × heads × size for each pair of query and key."""
    rng, model = random.Random(7), checkpoint("llama")
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
