"""What steps say that they ran, beside a count of every single token that ran."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from batchinfer.core.samples import RequestSample
from batchinfer_kernels.cost import ModelCost, StepShape
from tests.batchinfer.engine.small_engine import Limits, checkpoint, cpu_ops, greedy, make_engine, make_runner
from tests.kernels.gpu.pairs import each_first
from tests.model_costs import llama_cost

LAYERS, OUTPUT = 2, 40
ATTENTION = checkpoint("llama").spec.attention
PROMPTS = 24


@dataclass
class Counting:
    """Stands before a runner and notes every token that runs: (row, position)."""

    runner: Any
    ran: list[tuple[bytes, int]] = field(default_factory=list)
    sampled: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, chunks: list[Any], copies: Any = ()) -> Any:
        self.ran += [(c.sequence.request.key, at) for c in chunks for at in range(c.start, c.end)]
        self.sampled += sum(c.samples for c in chunks)
        return self.runner.launch(chunks, copies)


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
    counting = Counting(make_runner(model, cpu_ops(model), limits))
    engine = make_engine(counting, limits, frozenset())
    rows = greedy(prompts(), OUTPUT, ignore_eos=True)
    engine.add(rows)
    outputs = list(engine.drain())
    steps = [o.sample for o in outputs if o.sample is not None]
    requests: list[RequestSample] = [r for o in outputs for r in o.requests]
    unknown = {"roofline_s", "launch", "capture_s", "graph_bytes"}  # on a CPU, or without its peaks
    total = {name: sum(getattr(s, name) for s in steps) for name in steps[0].__slots__ if name not in unknown}
    once, lengths = set(counting.ran), {r.key: len(r.prompt) for r in rows}
    assert total["preemptions"] > 5, "nothing was forced"
    assert total["recomputed_tokens"] == len(counting.ran) - len(once) > 0
    assert total["prefill_tokens"] + total["decode_tokens"] == len(counting.ran)
    assert total["decode_tokens"] == sum(at >= lengths[key] for key, at in once) == PROMPTS * (OUTPUT - 1)
    prompt = total["prefill_tokens"] - total["recomputed_tokens"]
    assert prompt == sum(at < lengths[key] for key, at in once)
    assert prompt + total["cached_tokens"] == sum(lengths.values())
    assert total["cached_tokens"] == sum(r.cached_tokens for r in requests)
    assert (total["cached_tokens"] > 0) == caching
    assert total["flops"] == flops(counting.cost, once, counting.sampled)


def test_a_step_that_only_recomputes_moves_nothing_of_use() -> None:
    model = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
    costs = model.step(StepShape(0, 0, 0, 0))
    assert {(c.flops, c.bytes) for c in costs.values()} == {(0, 0)}


def test_the_head_is_not_read_by_a_step_that_samples_nothing() -> None:
    model = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
    costs = model.step(StepShape(5, 0, 30, 10))
    unread = {name for name, cost in costs.items() if not cost.bytes}
    assert unread == {"final_norm", "lm_head", "sample", "copy_parts"}
