"""Tests that log-probabilities of continuations match transformers for any batch, chunks and cache."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from batchinfer.core.continuations import Continuations
from batchinfer.core.request import Request, Scores
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner import row_scores
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.engine.small_engine import (
    MIXED,
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    key_of,
    looking_ahead,
    make_engine,
    make_runner,
    spoil,
)
from tests.batchinfer.engine.split_prompts import PreemptingOnce, PromptSplit, prompt_splits
from tests.examples import examples

Row = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # a context, and its continuations


def asked(rows: tuple[Row, ...]) -> list[Request]:
    found = []
    for number, (context, each) in enumerate(rows):
        prompt = np.array([*context, *(token for one in each for token in one)], np.int32)
        found.append(Request(key_of(number), prompt, SamplingParams.scores(tuple(map(len, each)))))
    return found


def drawn(seed: int, shapes: tuple[tuple[int, tuple[int, ...]], ...], vocab: int = 260) -> tuple[Row, ...]:
    """Return rows of a context and continuations with these lengths.

    Every second context starts like the one before, and many continuations share a prefix.
    """
    rng, rows, before = random.Random(seed), list[Row](), list[int]()
    for number, (length, lengths) in enumerate(shapes):
        shared = before[: length - 1] if number % 2 else []
        before = shared + [rng.randrange(vocab) for _ in range(length - len(shared))]
        each = [tuple(rng.choice((rng.randrange(vocab), 7, 8)) for _ in range(size)) for size in lengths]
        rows.append((tuple(before), tuple(each)))
    return tuple(rows)


@cache
def reference(family: str, rows: tuple[Row, ...], **options: Any) -> list[tuple[Any, Any]]:
    source = folder(family, **options)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    return [scored(model, row) for row in rows]


def scored(model: Any, row: Row) -> tuple[Any, Any]:
    """Return transformers' log-probabilities of each continuation alone, and which tokens are the most
    likely."""
    (context, each), logprobs, best = row, list[Any](), list[Any]()
    for one in each:
        with torch.no_grad():
            logits = model(torch.tensor([context + one])).logits[0, len(context) - 1 : -1].float()
        logprobs.append(logits.log_softmax(-1)[range(len(one)), list(one)].numpy())
        best.append((logits.argmax(-1) == torch.tensor(one)).numpy())
    return np.concatenate(logprobs), np.concatenate(best)


def check(ran: Ran, wanted: list[tuple[Any, Any]], atol: float = 1e-4) -> None:
    assert len(ran.completions) == len(wanted)
    for number, (logprobs, best) in enumerate(wanted):
        completion = ran.completions[key_of(number)]
        assert (completion.finish_reason, completion.error) == ("stop", None)
        assert isinstance(completion.output, Scores)
        np.testing.assert_allclose(completion.output.logprobs, logprobs, atol=atol, rtol=1e-4)
        np.testing.assert_array_equal(completion.output.greedy, best)


SHAPES = (
    (1, (1, 1)),
    (17, (5,)),
    (40, (1, 2, 3, 3)),
    (63, (30,)),
    (2, (2, 2, 2, 1)),
    (5, (40, 3)),
    (33, (1,) * 9),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "granite", "mixtral"])
def test_scores_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of a row's trie runs once, and the context of other rows comes from the cache."""
    monkeypatch.setattr(row_scores, "_ROWS_AT_ONCE", 7)
    rows, limits = drawn(1, SHAPES), Limits(budget=24)
    ran = drain(
        make_engine(make_runner(checkpoint(family), TorchOps(), limits), limits, frozenset()), asked(rows)
    )
    check(ran, reference(family, rows))
    nodes = [
        len(parts.context) - 1 + sum(len(b.tokens) - b.first for b in parts.branches())
        for parts in (Continuations.of(r.prompt, r.params.scored) for r in asked(rows))
    ]
    assert [ran.requests[key_of(row)].prompt_tokens for row in range(len(rows))] == nodes
    cached = sum(one.cached_tokens for one in ran.requests.values())
    assert ran.total("cached_tokens") == cached, "a row does not save what it has run itself"
    once = sum(nodes) - cached
    assert ran.total("prefill_tokens") == once, "prompts are run once, and then the nodes of their tries"
    scored = sum(count - len(context) + 1 for count, (context, _) in zip(nodes, rows, strict=True))
    assert ran.total("sampled_tokens") == scored
    assert ran.total("decode_tokens") == 0


def test_scored_tokens_of_a_cached_prefix_run_again() -> None:
    """The rows differ within the scored tokens: the cache has their K and V, but no logits."""
    context, shared = tuple(range(40, 57)), tuple(range(60, 72))
    rows: tuple[Row, ...] = tuple((context, ((*shared, last), (7, last))) for last in (1, 2, 3))
    model, limits = checkpoint("llama"), Limits(budget=64, block_size=4)
    ran = drain(make_engine(make_runner(model, TorchOps(), limits), limits, frozenset()), asked(rows))
    check(ran, reference("llama", rows))
    assert ran.total("cached_tokens") == 2 * (len(context) - 1), "all tokens before the first scored one"


# The length of a context, and the lengths of its continuations
SHAPE = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple))


@settings(max_examples=examples(8, 300), deadline=None, print_blob=True)
@given(split=prompt_splits(), shapes=st.lists(SHAPE, min_size=1, max_size=6), seed=st.integers(0, 3))
def test_no_batch_changes_a_score(
    split: PromptSplit, shapes: list[tuple[int, tuple[int, ...]]], seed: int
) -> None:
    rows = drawn(seed, tuple(shapes))
    ran = drain(make_engine(split.runner(), split.limits, frozenset()), asked(rows))
    check(ran, reference(split.family, rows, **split.options), atol=3e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_prompts_run_again(ahead: bool) -> None:
    model, rows = checkpoint("qwen2", **MIXED), drawn(2, SHAPES)
    limits = Limits(budget=16, block_size=4, blocks=400)
    runner: Any = make_runner(model, cpu_ops(model), limits)
    engine = make_engine(looking_ahead(runner) if ahead else runner, limits, frozenset(), kind=PreemptingOnce)
    ran = drain(engine, asked(rows))
    assert ran.total("preemptions") > 0
    check(ran, reference("qwen2", rows, **MIXED))


def test_logits_that_are_not_finite_make_an_error() -> None:
    model, limits = checkpoint("llama"), Limits(budget=8, caching=False)
    runner = make_runner(model, TorchOps(), limits)
    bad = 259
    spoil(runner, bad)
    rows: tuple[Row, ...] = (((1, 2), ((3,), (4, 5))), ((1, 2), ((bad, 4), (3, 4))), ((1,), ((bad,),)))
    ran = drain(make_engine(runner, limits, frozenset()), asked(rows))
    found = [ran.completions[key_of(row)] for row in range(3)]
    assert [one.error.code if one.error else None for one in found] == [None, "nan_logits", None]
    assert (found[1].output, found[1].finish_reason) == (None, "error")


def test_a_request_too_large_for_the_cache_is_an_error_once() -> None:
    """Also if its first branch fits and a longer one does not."""
    limits = Limits(budget=8, blocks=4, block_size=4)
    engine = make_engine(make_runner(checkpoint("llama"), TorchOps(), limits), limits, frozenset())
    rows: tuple[Row, ...] = (((1,) * 12, ((2, 3), (4,) * 20)), ((1,) * 30, ((2,),)), ((1, 2), ((3,),)))
    ran = drain(engine, asked(rows))
    codes = [error.code if (error := ran.completions[key_of(row)].error) else None for row in range(3)]
    assert codes == ["kv_cache_too_small", "kv_cache_too_small", None]
