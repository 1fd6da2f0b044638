"""Tests that log-probabilities of prompt tokens match transformers with caching, chunks and
preemptions."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from batchinfer.core.request import Request
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
    make_engine,
    make_runner,
    request,
    spoil,
)
from tests.batchinfer.engine.speculating import Drafts, remembered
from tests.batchinfer.engine.split_prompts import PreemptingOnce, PromptSplit, prompt_splits
from tests.examples import examples

OUTPUT = 6
# Some rows of each kind have prompt log-probabilities
KINDS: list[dict[str, Any]] = [
    {"prompt_logprobs": 3},
    {},
    {"prompt_logprobs": 0, "temperature": 0.9},
    {"prompt_logprobs": 20, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 1.1, "logprobs": 1},
    {"prompt_logprobs": 1, "min_tokens": 4},
]
LENGTHS = (40, 33, 17, 63, 1, 2, 29, 40)


def rows(seed: int, lengths: Seq[int]) -> list[Request]:
    """Return rows whose prompts share about half of their tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [[*shared[: n // 2], *(rng.randrange(250) for _ in range(n - n // 2))] for n in lengths]
    return [request(n, prompt, OUTPUT, **KINDS[n % len(KINDS)]) for n, prompt in enumerate(prompts)]


@cache
def reference(family: str, **options: Any) -> Any:
    source = folder(family, **options)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")


def check(ran: Ran, requests: list[Request], theirs: Any, atol: float = 1e-4) -> None:
    assert len(ran.completions) == len(requests)
    for row in requests:
        completion, most = ran.completions[row.key], row.params.prompt_logprobs
        assert completion.error is None
        found = completion.tokens.prompt
        if most is None:
            assert found is None
            continue
        assert found is not None
        np.testing.assert_array_equal(found.token_ids, row.prompt)
        with torch.inference_mode():
            logits = theirs(torch.from_numpy(row.prompt)[None].long()).logits[0, :-1].float()
        wanted, count = logits.log_softmax(-1), len(row.prompt) - 1
        chosen = wanted[range(count), row.prompt[1:].tolist()]
        np.testing.assert_allclose(found.logprobs.chosen, chosen, atol=atol, rtol=1e-4)
        assert found.logprobs.top_ids.shape == found.logprobs.top.shape == (count, most)
        if count:
            np.testing.assert_allclose(found.logprobs.top, wanted.topk(most).values, atol=atol, rtol=1e-4)
            named = wanted.gather(-1, torch.from_numpy(found.logprobs.top_ids).long())
            np.testing.assert_allclose(found.logprobs.top, named, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_prompt_logprobs_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities change no answer, and other rows still share prefixes."""
    monkeypatch.setattr(row_scores, "_ROWS_AT_ONCE", 7)
    model, limits, requests = checkpoint(family), Limits(budget=24), rows(1, LENGTHS)
    runner, eos = make_runner(model, TorchOps(), limits), frozenset(model.spec.eos_token_ids)
    ran = drain(make_engine(runner, limits, eos), requests)
    check(ran, requests, reference(family))
    silent = [replace(r, params=replace(r.params, prompt_logprobs=None)) for r in requests]
    assert drain(make_engine(runner, limits, eos), silent).answers == ran.answers
    cached = {row.key: ran.requests[row.key].cached_tokens for row in requests}
    asking = [row.key for row in requests if row.params.prompt_logprobs is not None]
    assert not any(cached[key] for key in asking), "the cache has no logits"
    assert sum(cached.values()) > 0, "rows that do not ask share"
    answered = sum(len(ran.tokens(row)) for row in range(len(requests)))
    scored = sum(len(row.prompt) - 1 for row in requests if row.key in asking)
    assert ran.total("sampled_tokens") == answered + scored


@pytest.mark.parametrize("budget", [24, 300])
def test_drafts_change_no_prompt_logprob(budget: int) -> None:
    """Steps score prompts together with drafts of decoding rows."""
    model, limits, requests = (
        checkpoint("llama"),
        Limits(budget=budget, seqs=3),
        rows(1, [*LENGTHS, *LENGTHS]),
    )
    runner, eos = make_runner(model, TorchOps(), limits), frozenset(model.spec.eos_token_ids)
    plain = drain(make_engine(runner, limits, eos), requests)
    drafts = Drafts(remembered(plain, right=1.0, seed=3))
    ran = drain(make_engine(runner, limits, eos, drafter=drafts), requests)
    check(ran, requests, reference("llama"))
    assert ran.answers == plain.answers
    assert sum(right for _, right in drafts.took) > 10
    assert all(right == drafted for drafted, right in drafts.took), "each is compared with its own row"


@settings(max_examples=examples(6, 300), deadline=None, print_blob=True)
@given(
    split=prompt_splits(),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    seed=st.integers(0, 3),
)
def test_no_batch_changes_prompt_logprobs(split: PromptSplit, lengths: list[int], seed: int) -> None:
    """With any chunks, cache, preemptions, look-ahead and micro-batches."""
    requests, eos = rows(seed, lengths), frozenset(split.model.spec.eos_token_ids)
    ran = drain(make_engine(split.runner(), split.limits, eos), requests)
    check(ran, requests, reference(split.family, **split.options), atol=3e-4)


def test_preempted_prompts_run_again() -> None:
    model, requests = checkpoint("qwen2", **MIXED), rows(2, LENGTHS)
    limits = Limits(budget=16, block_size=4, blocks=400)
    runner = make_runner(model, cpu_ops(model), limits)
    ran = drain(make_engine(runner, limits, frozenset(), kind=PreemptingOnce), requests)
    assert ran.total("preemptions") > 0
    check(ran, requests, reference("qwen2", **MIXED))


def test_logits_that_are_not_finite_make_an_error() -> None:
    model, limits = checkpoint("llama"), Limits(budget=8, caching=False)
    runner = make_runner(model, TorchOps(), limits)
    bad = 259
    spoil(runner, bad)
    prompts = [[1, bad, 2, 3], [1, bad, 2, 3], [1, 2, 3]]
    asked: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {}, {"prompt_logprobs": 1}]
    requests = [request(n, one, 2, **how) for n, (one, how) in enumerate(zip(prompts, asked, strict=True))]
    ran = drain(make_engine(runner, limits, frozenset()), requests)
    found = [ran.completions[key_of(row)] for row in range(3)]
    assert [one.error.code if one.error else None for one in found] == ["nan_logits", None, None]
    assert (found[0].output, found[0].finish_reason) == (None, "error")
