"""Tests that vectors of prompts match transformers for any batch, chunks, cache and preemptions."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel

from batchinfer.core.request import Request, Vector
from batchinfer.core.sampling import Pooling, SamplingParams
from batchinfer.engine.runner.sampler import STATE_UNIT, _exact_sums
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.engine.small_engine import (
    MIXED,
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    greedy,
    key_of,
    looking_ahead,
    make_engine,
    make_runner,
    spoil,
)
from tests.batchinfer.engine.split_prompts import PreemptingOnce, prompt_splits
from tests.examples import examples

Floats = NDArray[np.float32]
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "granite",
    "olmo2",
    "mixtral",
)
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def asked(prompts: list[list[int]], pooling: Pooling) -> list[Request]:
    params = SamplingParams.vector(pooling)
    return [Request(key_of(row), np.array(ids, np.int32), params) for row, ids in enumerate(prompts)]


def run(runner: Any, limits: Limits, lengths: tuple[int, ...], pooling: Pooling, **more: Any) -> Ran:
    engine = make_engine(runner, limits, frozenset(), **more)
    return drain(engine, asked(drawn_prompts(lengths), pooling))


def vectors(ran: Ran) -> list[Floats]:
    found = []
    for row in range(len(ran.completions)):
        completion = ran.completions[key_of(row)]
        assert completion.finish_reason == "stop"
        assert isinstance(completion.output, Vector)
        assert completion.output.values.dtype == np.float32
        found.append(completion.output.values)
    return found


def drawn_prompts(lengths: tuple[int, ...], vocab: int = 260) -> list[list[int]]:
    """Return prompts of these lengths; every second one starts like the one before."""
    rng, found = random.Random(3), list[list[int]]()
    for number, length in enumerate(lengths):
        fresh = [rng.randrange(vocab) for _ in range(length)]
        shared = found[-1][: length - 1] if number % 2 else []
        found.append(shared + fresh[len(shared) :])
    return found


@cache
def reference(family: str, lengths: tuple[int, ...], **options: Any) -> list[Floats]:
    """Return the last hidden states of transformers, one prompt at a time."""
    model = AutoModel.from_pretrained(
        folder(family, **options), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in drawn_prompts(lengths)]


def pooled(states: Floats, pooling: Pooling) -> Floats:
    return states[-1] if pooling == "last" else states.mean(0)


LENGTHS = (1, 17, 40, 63, 2, 5, 90, 33)


@pytest.mark.sample(6)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_equal_those_of_transformers(family: str, pooling: Pooling) -> None:
    """Chunks of a small budget; prefixes are shared for vectors of the last token."""
    model, limits = checkpoint(family), Limits(budget=24, caching=pooling == "last")
    ran = run(make_runner(model, TorchOps(), limits), limits, LENGTHS, pooling)
    for found, states in zip(vectors(ran), reference(family, LENGTHS), strict=True):
        np.testing.assert_allclose(found, pooled(states, pooling), atol=1e-4, rtol=1e-4)
    assert (ran.total("cached_tokens") > 0) == (pooling == "last")
    assert ran.total("sampled_tokens") == ran.total("decode_tokens") == 0
    samples = [ran.requests[key_of(row)] for row in range(len(LENGTHS))]
    assert [(one.prompt_tokens, one.completion_tokens) for one in samples] == [(n, 0) for n in LENGTHS]


@settings(max_examples=examples(8, 300), deadline=None, print_blob=True)
@given(data=st.data(), pooling=st.sampled_from(POOLINGS))
def test_no_batch_changes_a_vector(data: st.DataObject, pooling: Pooling) -> None:
    split = data.draw(prompt_splits(caching=st.just(pooling == "last")))
    lengths = tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=8)))
    ran = run(split.runner(), split.limits, lengths, pooling)
    for found, states in zip(vectors(ran), reference(split.family, lengths, **split.options), strict=True):
        np.testing.assert_allclose(found, pooled(states, pooling), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_prompts_run_again(pooling: Pooling, ahead: bool) -> None:
    model = checkpoint("qwen2", **MIXED)
    limits = Limits(budget=16, caching=pooling == "last", block_size=4, blocks=400)
    runner: Any = make_runner(model, cpu_ops(model), limits)
    ran = run(looking_ahead(runner) if ahead else runner, limits, LENGTHS, pooling, kind=PreemptingOnce)
    assert ran.total("preemptions") > 0
    assert ran.total("recomputed_tokens") > 0
    for found, states in zip(vectors(ran), reference("qwen2", LENGTHS, **MIXED), strict=True):
        np.testing.assert_allclose(found, pooled(states, pooling), atol=1e-4, rtol=1e-3)


def test_a_sum_does_not_depend_on_chunks() -> None:
    """Sums are bit-identical if states are kept: a runner may use any chunks."""
    states = torch.randn(3000, 64) * torch.logspace(-3, 3, 64)
    whole = _exact_sums(states, torch.zeros(3000, dtype=torch.int64), 1)
    parts = sum(_exact_sums(part, torch.zeros(len(part), dtype=torch.int64), 1) for part in states.split(7))
    assert torch.equal(whole, parts)
    assert (whole[0] - states.double().sum(0)).abs().max() <= 3000 * STATE_UNIT


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_make_an_error(pooling: Pooling, value: float) -> None:
    model, limits = checkpoint("llama"), Limits(budget=8, caching=False)
    runner = make_runner(model, TorchOps(), limits)
    bad = 259
    spoil(runner, bad, value)
    prompts = [[1, 2, 3], [1] * 11 + [bad], [5, 6]]
    ran = drain(make_engine(runner, limits, frozenset()), asked(prompts, pooling))
    errors = [ran.completions[key_of(row)].error for row in range(3)]
    assert [error.code if error else None for error in errors] == [None, "nan_vector", None]
    assert ran.completions[key_of(1)].output is None


def both(lengths: tuple[int, ...], pooling: Pooling, **more: Any) -> list[Request]:
    """Return requests for the vectors of these prompts, each followed by a request for the prompt's text."""
    prompts = drawn_prompts(lengths)
    texts = greedy(prompts, 6, ignore_eos=True, **more)
    found = [
        [one, replace(text, key=key_of(100 + row))]
        for row, (one, text) in enumerate(zip(asked(prompts, pooling), texts, strict=True))
    ]
    return [one for pair in found for one in pair]


@settings(max_examples=examples(5, 300), deadline=None, print_blob=True)
@given(
    data=st.data(),
    pooling=st.sampled_from(POOLINGS),
    asks=st.sampled_from([{}, {"logprobs": 2}, {"prompt_logprobs": 1}]),
)
def test_generating_rows_in_the_batch_change_no_vector(
    data: st.DataObject, pooling: Pooling, asks: dict[str, Any]
) -> None:
    """With `mean`, the cache has no states, but generating rows still find prefixes in it."""
    split = data.draw(prompt_splits())
    lengths = tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)))
    ran = drain(make_engine(split.runner(), split.limits, frozenset()), both(lengths, pooling, **asks))
    alone = drain(
        make_engine(split.runner(), split.limits, frozenset()),
        greedy(drawn_prompts(lengths), 6, ignore_eos=True, **asks),
    )
    for row, states in enumerate(reference(split.family, lengths, **split.options)):
        output = ran.completions[key_of(row)].output
        assert isinstance(output, Vector)
        np.testing.assert_allclose(output.values, pooled(states, pooling), atol=2e-4, rtol=1e-3)
        text, wanted = ran.completions[key_of(100 + row)].tokens, alone.completions[key_of(row)].tokens
        assert text.token_ids.tolist() == wanted.token_ids.tolist()
        for name in ("logprobs", "prompt"):
            own, other = getattr(text, name), getattr(wanted, name)
            assert (own is None) == (other is None)
        if text.logprobs is not None and wanted.logprobs is not None:
            np.testing.assert_allclose(text.logprobs.chosen, wanted.logprobs.chosen, atol=1e-3)
        if text.prompt is not None and wanted.prompt is not None:
            np.testing.assert_allclose(text.prompt.logprobs.chosen, wanted.prompt.logprobs.chosen, atol=1e-3)


def test_an_engine_makes_vectors_in_one_way() -> None:
    model = checkpoint("llama")
    engine = make_engine(make_runner(model, TorchOps(), Limits()), Limits(), frozenset())
    engine.add(asked([[1, 2]], "last"))
    with pytest.raises(ValueError, match=r"vectors .mean. cannot run together with .* vectors .last."):
        engine.add(asked([[1, 2]], "mean"))
    scored = Request(key_of(5), np.array([1, 2, 3], np.int32), SamplingParams.scores((1,)))
    with pytest.raises(ValueError, match="requests for scores cannot run together"):
        engine.add([scored])
    assert sum(len(output.completions) for output in engine.drain()) == 1
    engine.add([scored])
    with pytest.raises(
        ValueError, match="for tokens cannot run together with unfinished requests for scores"
    ):
        engine.add(greedy([[1, 2]], 3))
    assert sum(len(output.completions) for output in engine.drain()) == 1
    engine.add(asked([[1, 2]], "mean"))
    assert sum(len(output.completions) for output in engine.drain()) == 1
