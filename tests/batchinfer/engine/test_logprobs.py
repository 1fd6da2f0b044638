"""Tests that log-probabilities of output tokens match transformers' logits."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer.core.request import Request, TokenLogprobs
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.sequence import CollectedLogprobs
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.engine.hashing_model import hashing_runner
from tests.batchinfer.engine.small_engine import (
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
    watcher,
)
from tests.batchinfer.engine.test_sampler import Multiples, make_sequence, plan_of
from tests.batchinfer.models.foreign.kit import make

OUTPUT = 10
TOLERANCE = 1e-4
LENGTHS = (1, 6, 17, 33, 40, 40, 29, 12, 21)
# some rows of each kind have log-probabilities
KINDS: list[dict[str, Any]] = [
    {"logprobs": 5},
    {},
    {"logprobs": 0, "temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1},
    {"logprobs": 20, "repetition_penalty": 1.4, "min_tokens": 6},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"logprobs": 2, "logit_bias": ((7, 9.0), (30, -100.0), (31, 8.5))},
    {"logprobs": 1, "temperature": 1.3, "top_k": 30, "presence_penalty": 0.7, "min_tokens": 4},
    {"logprobs": 3, "stop": ("there",), "min_tokens": 2},
]
WAYS = {
    "at once": Limits(budget=512),
    "chunks": Limits(budget=24, caching=False),
    "preempted": Limits(budget=32, blocks=19, scarce=True),
}


def rows() -> list[Request]:
    rng = random.Random(4)
    shared = [rng.randrange(250) for _ in range(32)]
    own = [[rng.randrange(250) for _ in range(length - length // 2)] for length in LENGTHS]
    prompts = [shared[: length // 2] + rest for length, rest in zip(LENGTHS, own, strict=True)]
    return [request(n, prompt, OUTPUT, **KINDS[n]) for n, prompt in enumerate(prompts)]


def run(runner: ModelRunner, limits: Limits, eos: frozenset[int], requests: list[Request]) -> Ran:
    return drain(make_engine(runner, limits, eos, stop_streams=watcher), requests)


def check(row: Request, answer: list[int], found: TokenLogprobs | None, logits: torch.Tensor) -> None:
    """Check the log-probabilities of an answer.

    Args:
        logits: logits before each of the answer's tokens, [m, vocab].
    """
    most = row.params.logprobs
    if most is None:
        assert found is None
        return
    assert found is not None
    wanted = logits.float().log_softmax(-1)
    assert found.chosen.shape == (len(answer),)
    assert found.top.shape == found.top_ids.shape == (len(answer), most)
    chosen = wanted[torch.arange(len(answer)), torch.tensor(answer)]
    np.testing.assert_allclose(found.chosen, chosen.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(found.top, wanted.topk(most).values.numpy(), atol=TOLERANCE)
    named = wanted.gather(-1, torch.from_numpy(found.top_ids).long())
    np.testing.assert_allclose(found.top, named.numpy(), atol=TOLERANCE)
    assert all(len(set(ids)) == most for ids in found.top_ids.tolist())


def check_all(ran: Ran, requests: list[Request], theirs: Any) -> None:
    for row in requests:
        completion = ran.completions[row.key]
        answer, prompt = completion.tokens.token_ids.tolist(), row.prompt.tolist()
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        check(row, answer, completion.tokens.logprobs, logits)


@cache
def reference(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logprobs_equal_those_of_transformers_logits(family: str, way: str) -> None:
    """Also with sampling, penalties, bans and stop strings, next to rows without log-probabilities. Tokens
    equal the tokens of a run without log-probabilities."""
    model, limits, requests = checkpoint(family), WAYS[way], rows()
    if family == "gemma2" and limits.scarce:
        limits = replace(limits, blocks=75)
    runner, eos = make_runner(model, cpu_ops(model), limits), frozenset(model.spec.eos_token_ids)
    ran = run(runner, limits, eos, requests)
    check_all(ran, requests, reference(family))
    silent = [replace(r, params=replace(r.params, logprobs=None)) for r in requests]
    assert run(runner, limits, eos, silent).answers == ran.answers
    assert len({token for answer, _ in ran.answers.values() for token in answer}) > 20
    if limits.scarce:
        assert sum(step.preemptions for step in ran.steps) > 0
    if way == "chunks":
        assert any(step.prefill_tokens and step.decode_tokens for step in ran.steps)


def test_models_that_transformers_computes_have_logprobs() -> None:
    foreign = make("opt")
    limits, requests = WAYS["chunks"], rows()
    ran = run(foreign.runner(limits), limits, frozenset(foreign.source.spec.eos_token_ids), requests)
    check_all(ran, requests, foreign.theirs)


@pytest.mark.parametrize("asking", [range(7), (0, 2, 5), (3,), (6,)])
def test_logprobs_are_taken_before_logits_are_changed(asking: tuple[int, ...]) -> None:
    """Penalties, bans and masks change the logits in place; only rows with log-probabilities need a copy."""
    torch.manual_seed(2)
    logits = torch.randn(7, 40) * 3
    logits[:, 7] = 20.0
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 3.0},
        {"min_tokens": 9, "stop_token_ids": (7,)},
        {"temperature": 0.7, "top_k": 2},
        {"most": 5},  # masked: token 7 is no multiple of 5
        {},
        {"frequency_penalty": 9.0},
        {"logit_bias": ((7, -100.0),)},
    ]
    sequences = [
        make_sequence(i, [1, 2], [7, 7], **{"most": 100, **kind}, logprobs=4 if i in asking else None)
        for i, kind in enumerate(kinds)
    ]
    masks = Multiples(sequences)
    sampler = Sampler(frozenset(), masks)
    assert not sampler.tries_argmax(masks.plan(slice(4, 5))) or 4 not in asking
    sampled = sampler.sample(TorchOps(), logits.clone(), masks.plan())
    assert [int(sampled.tokens[i]) == 7 for i in range(7)] == [False, False, True, False, True, False, False]
    found = sampled.logprobs
    assert found is not None
    assert found.rows == list(asking)
    wanted = logits.log_softmax(-1)[list(asking)]
    chosen = sampled.tokens[list(asking)]
    torch.testing.assert_close(found.chosen, wanted.gather(-1, chosen[:, None])[:, 0])
    torch.testing.assert_close(found.top, wanted.topk(4).values)


@pytest.mark.parametrize(
    "kind",
    [
        {"logit_bias": ((7, -100.0),)},
        {"allowed_token_ids": (3, 5)},
        {"bad_tokens": ((7,),)},
        {"min_tokens": 9, "stop_token_ids": (7,)},
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_logits_are_copied_if_any_parameter_changes_them(kind: dict[str, Any]) -> None:
    """Rows whose logits nothing changes need no copy."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3))
    logits[:, 7] = 20.0
    rows = [make_sequence(row, [1], [], logprobs=1, **kind) for row in range(2)]
    sampled = Sampler(frozenset()).sample(TorchOps(), logits.clone(), plan_of(rows))
    assert sampled.logprobs is not None
    assert 7 not in sampled.tokens.tolist()
    wanted = logits.log_softmax(-1).gather(-1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs.chosen, wanted)


def test_logprobs_among_allowed_tokens_are_of_the_masked_logits_of_the_model() -> None:
    """The other parameters of the row and the other rows have no effect."""
    torch.manual_seed(3)
    logits = torch.randn(6, 40) * 3
    kinds: list[dict[str, Any]] = [
        {"most": 5, "confidence": True},
        {"most": 5, "logprobs": 4},
        {"most": 7, "confidence": True, "temperature": 0.7, "repetition_penalty": 3.0},
        {"confidence": True},  # it has no mask: all tokens are allowed
        {},
        {"most": 3, "confidence": True, "temperature": 2.0, "top_k": 2},
    ]
    sequences = [make_sequence(i, [1, 2], [7, 7], **{"most": 100, **kind}) for i, kind in enumerate(kinds)]
    masks = Multiples(sequences)
    plan = masks.plan()
    for rows in (slice(0, 6), slice(2, 6)):  # whole, and the rest of it in a micro-batch
        part = pickle.loads(pickle.dumps(plan.part(rows.start, rows.stop)))
        sampled = Sampler(frozenset(), masks).sample(TorchOps(), logits[rows].clone(), part)
        assert sampled.logprobs is not None
        found = dict(zip(sampled.logprobs.rows, sampled.logprobs.chosen.tolist(), strict=True))
        for i in range(rows.start, rows.stop):
            at, kind = i - rows.start, kinds[i]
            most = kind.get("most", 100) if kind.get("confidence") else 100
            allowed = [t for t in range(40) if most == 100 or (t % most == 0 and t > 7)]
            token = int(sampled.tokens[at])
            if kind.get("confidence") or "logprobs" in kind:
                wanted = logits[i, allowed].log_softmax(-1)[allowed.index(token)]
                assert found.pop(at) == pytest.approx(float(wanted), abs=1e-5)
        assert not found


def test_more_top_logprobs_than_the_vocabulary_give_all_of_it() -> None:
    limits = Limits(budget=40, seqs=12, blocks=80, block_size=4)
    ran = run(hashing_runner(ModelRunner, 80, 4), limits, frozenset(), [request(0, [3, 4], 3, logprobs=20)])
    found = ran.completions[key_of(0)].tokens.logprobs
    assert found is not None
    assert found.top.shape == (3, 12)
    np.testing.assert_allclose(np.exp(found.top).sum(-1), 1, atol=1e-5)


def test_logprobs_are_copied_from_the_arrays_of_a_step() -> None:
    """A view would keep the step's array alive while any of its rows runs."""
    collected, top = CollectedLogprobs(), np.zeros((1, 2), np.float32)
    collected.append(TokenLogprobs(np.zeros(1, np.float32), top, np.zeros((1, 2), np.int32)), 0)
    top[:] = 9
    assert collected.all().top.tolist() == [[0, 0]]


def test_tokens_that_end_an_answer_count_together_among_allowed_ones() -> None:
    """Not for rows with log-probabilities of all tokens, nor before the answer ends."""
    ends = frozenset({9, 12})
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(4))
    logits[:3, 9], logits[:3, 12], logits[3, 15] = 14.0, 15.0, 20.0
    kinds: list[dict[str, Any]] = [{"confidence": True}, {"logprobs": 1}, {}, {"confidence": True}]
    rows = [make_sequence(i, [1, 2], [7], **{"most": 3, **kind}) for i, kind in enumerate(kinds)]
    masks = Multiples(rows)
    sampled = Sampler(ends, masks).sample(TorchOps(), logits.clone(), masks.plan())
    assert sampled.tokens.tolist() == [12, 12, 12, 15]
    assert sampled.logprobs is not None
    allowed = [token for token in range(8, 40) if token % 3 == 0]
    among, all_of_them = logits[:, allowed].log_softmax(-1), logits.log_softmax(-1)
    at = {token: place for place, token in enumerate(allowed)}
    wanted = [among[0, [at[9], at[12]]].logsumexp(-1), all_of_them[1, 12], among[3, at[15]]]
    torch.testing.assert_close(sampled.logprobs.chosen, torch.stack(wanted))
