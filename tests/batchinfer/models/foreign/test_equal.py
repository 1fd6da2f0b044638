"""Tests model types that transformers computes over our cache: tokens equal the greedy ones of its own
generate."""

from __future__ import annotations

import random

import pytest

from tests.batchinfer.engine.small_engine import Limits, drain, greedy, make_engine
from tests.batchinfer.models.foreign.kit import Foreign, make
from tests.examples import everything, first_of
from tests.foreign_models import EOS, RUNS, THINNED, VOCAB
from tests.foreign_table import attention_of, attention_on_page

OUTPUT = 7
LENGTHS = (1, 17, 40)
BUDGET, BLOCK = 24, 8  # most prompts are split


def scarcities(foreign: Foreign) -> list[Limits]:
    """Return limits with room for the longest row and slightly more, which leads to preemptions."""
    least = foreign.layout(BLOCK).sizes.alone(max(map(len, prompts())) + OUTPUT, BUDGET)
    return [
        Limits(budget=BUDGET, blocks=least + more, block_size=BLOCK, scarce=True)
        for more in (0, 1, 3, 6)[:: 1 if everything() else 2]
    ]


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB - 10) for _ in range(60)]
    own = [[rng.randrange(VOCAB - 10) for _ in range(n)] for n in LENGTHS]
    return [*own, [*shared[:40], 9, 8], [*shared[:41], 7], shared, shared[:25]]


def kinds() -> list[object]:
    return [pytest.param(kind, marks=[] if kind in THINNED else [pytest.mark.slow], id=kind) for kind in RUNS]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", kinds())
def test_greedy_tokens_equal_transformers(kind: str) -> None:
    """With chunks, steps of prompts and decoding rows, shared prefixes and preemption. The page's row is
    right."""
    foreign = make(kind)
    wanted = foreign.greedy(prompts(), OUTPUT)
    room = scarcities(foreign)
    runner, steps = foreign.runner(room[-1]), []
    for limits in room:
        ran = drain(make_engine(runner, limits, frozenset({EOS})), greedy(prompts(), OUTPUT))
        found = [ran.tokens(row) for row in range(len(wanted))]
        assert found == wanted
        steps += ran.steps
    assert len({token for answer in wanted for token in answer}) > 5, "answers too flat to show a slip"
    assert sum(step.cached_tokens for step in steps) > 0
    assert sum(step.preemptions for step in steps) > 0
    assert any(step.prefill_tokens and step.decode_tokens for step in steps)
    assert max(step.prefill_tokens + step.decode_tokens for step in steps) <= BUDGET
    if kind in attention_on_page():  # a type that became a family of ours has no row
        assert attention_on_page()[kind] == attention_of(foreign.checkpoint.spec)


@pytest.mark.parametrize("width", first_of([27, 30], 1))
def test_experts_of_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped matmul needs rows at multiples of 16 bytes."""
    monkeypatch.setitem(RUNS, "olmoe", {**RUNS["olmoe"], "intermediate_size": width})
    foreign = make("olmoe")
    foreign.theirs.set_experts_implementation("eager")
    wanted = foreign.greedy(prompts(), OUTPUT)
    room = scarcities(foreign)[-1]
    ran = drain(make_engine(foreign.runner(room), room, frozenset({EOS})), greedy(prompts(), OUTPUT))
    assert [ran.tokens(row) for row in range(len(wanted))] == wanted
