"""Tests that draws follow the distribution that their parameters define, each parameter alone and several
together.

The expected distributions are computed here in float64 from the documentation. The draws use the real sampler
with fixed keys: a test that passes once always passes. Draws from the right distribution exceed a bound with
a probability below 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import DERIVED, SamplingParams
from batchinfer.engine.runner.sampler import Sampler, TokenMask
from batchinfer.engine.schedule.sampling_writer import SamplingWriter
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.input.prompts.keys import token_bytes, work_key
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from tests.examples import first_of

DRAWS = 4_000
PLACES = 40  # of the answer, at which each row draws
VOCAB, EOS = 23, 11
PROMPT, ANSWER = [3, 3, 5, 1], [7, 5, 7, 2]
LOGITS = np.random.default_rng(12).normal(0, 1.5, VOCAB).astype(np.float32)
LOGITS[[EOS, 7, 5]] += 1.5  # what parameters speak of is likely
Shares = NDArray[np.float64]

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "all": {
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((0, 1.5), (5, -0.5)),
        "allowed_token_ids": tuple(range(1, VOCAB)),
        "bad_tokens": ((4,), (2, 6)),
        "min_tokens": 9,
    },
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "answer's penalties": {"presence_penalty": 1.2, "frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": ((0, 2.5), (7, -1.5), (EOS, -100.0))},
    "allowed_token_ids": {"allowed_token_ids": (0, 4, 7, EOS, 20)},
    # the last one would start in the prompt
    "bad_words": {"bad_tokens": ((5,), (7, 2, EOS), (9, 2, 7), (2, 20), (1, 7, 5, 7, 2, 7))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (20,)},
    "temperature": {"temperature": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
}


def params_of(case: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 50, **CASES[case], **more})


def distribution(params: SamplingParams, allowed: Callable[[int], bool] = lambda _: True) -> Shares:
    """Return the probability of each token after PROMPT and ANSWER.

    Args:
        allowed: tokens that a constraint allows.
    """
    scores = LOGITS.astype(np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*PROMPT, *ANSWER}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in {*ANSWER}:
        scores[token] -= params.presence_penalty + params.frequency_penalty * ANSWER.count(token)
    if params.allowed_token_ids:
        scores[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    if len(ANSWER) < params.min_tokens:
        scores[[EOS, *params.stop_token_ids]] = -np.inf
    for *before, last in params.bad_tokens:
        if ANSWER[len(ANSWER) - len(before) :] == before:
            scores[last] = -np.inf
    scores[[token for token in range(VOCAB) if not allowed(token)]] = -np.inf
    shares: Shares = np.exp((scores - scores.max()) / params.temperature)
    return filtered(shares / shares.sum(), params)


def filtered(shares: Shares, params: SamplingParams) -> Shares:
    """Return the shares after top_k, top_p and min_p, in this order."""
    order = np.argsort(-shares, kind="stable")
    if params.top_k:
        shares[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= params.top_p * shares.sum()]] = 0
    shares[shares < params.min_p * shares.max()] = 0
    return shares / shares.sum()


def keys_of(params: SamplingParams, count: int) -> list[bytes]:
    """Return the work keys of `count` equal rows, as in an index."""
    text, tokens = params.canonical().to_json(), token_bytes(np.array(PROMPT, np.int32))
    return [work_key(b"statistics", text, tokens, occurrence) for occurrence in range(count)]


def draws(
    params: SamplingParams, rows: int, ops: Ops, places: int = PLACES, mask: TokenMask | None = None
) -> NDArray[np.int64]:
    """Return the next tokens of `rows` equal rows as if drawn at each of `places` positions, [places, rows]."""
    prompt, sequences = np.array(PROMPT, np.int32), list[Sequence]()
    for key in keys_of(params, rows):
        sequences.append(Sequence.of(Request(key, prompt, params), ContentRoots(1000), None, 0.0))
        sequences[-1].tokens.extend(ANSWER)
        sequences[-1].mask = None if mask is None else 0
    plan = SamplingWriter(frozenset([EOS])).of(sequences, [])
    found = []
    for place in range(places):
        drawn = plan.drawn and replace(plan.drawn, positions=plan.drawn.positions + np.int32(place))
        logits = torch.from_numpy(LOGITS).expand(rows, -1).clone()
        sampled = Sampler(frozenset([EOS]), mask).sample(ops, logits, replace(plan, drawn=drawn))
        found.append(sampled.tokens.numpy())
    return np.stack(found)


def surprise(seen: NDArray[np.int64], wanted: Shares) -> float:
    """Return chi-square of the counts divided by a bound, or infinity if an impossible token was drawn.

    Random counts exceed the bound with a probability below 1e-6 (Wilson and Hilferty, 1931). Rare tokens are
    merged until the expected count is 10.
    """
    if seen[wanted == 0].any():
        return float("inf")
    expected = wanted * seen.sum()
    rare = expected < 10
    pairs = [*zip(seen[~rare], expected[~rare], strict=True), (seen[rare].sum(), expected[rare].sum())]
    parts = [(count - mean) ** 2 / mean for count, mean in pairs if mean > 0]
    free = max(len(parts) - 1, 1)
    return float(sum(parts) / (free * (1 - 2 / (9 * free) + 5.2 * sqrt(2 / (9 * free))) ** 3))


@pytest.mark.parametrize("case", first_of(CASES, 5))
def test_draws_follow_their_distribution_and_not_the_default_one(case: str) -> None:
    params = params_of(case)
    tokens = draws(params, DRAWS // PLACES, TorchOps())
    seen = np.bincount(tokens.ravel(), minlength=VOCAB)
    print(case, "occurrences 0 to", DRAWS // PLACES - 1, "at", PLACES, "places:", seen.tolist())
    assert surprise(seen, distribution(params)) < 1
    assert case == "nothing" or surprise(seen, distribution(params_of("nothing"))) > 1


def test_draws_are_independent_of_other_seeds_rows_and_positions() -> None:
    """Equal seeds, rows and positions give equal draws."""
    plain, shares = params_of("nothing"), distribution(params_of("nothing"))
    tokens, other = (
        draws(params_of("nothing", seed=seed), DRAWS // PLACES, TorchOps()).astype(np.int64)
        for seed in (0, 1)
    )
    assert np.array_equal(tokens[:2, :50], draws(plain, 50, TorchOps(), 2))
    wanted = np.outer(shares, shares).ravel()
    pairs = {
        "seeds": (tokens, other),
        "rows": (tokens[:, :-1:2], tokens[:, 1::2]),
        "places": (tokens[:-1:2], tokens[1::2]),
    }
    for name, (some, others) in pairs.items():
        seen = np.bincount((some * VOCAB + others).ravel(), minlength=VOCAB**2)
        assert surprise(seen, wanted) < 1, name
    assert surprise(np.bincount((tokens * VOCAB + tokens).ravel(), minlength=VOCAB**2), wanted) > 1


@dataclass(frozen=True)
class EverySecond:
    """A mask that allows every second token and the last one."""

    def allowed(self, masks: list[int], tokens: list[int]) -> list[bool]:
        return [False for _ in tokens]  # only `fill` says

    def fill(self, masks: list[int], bits: NDArray[np.int32]) -> None:
        bits[:] = sum(1 << token for token in range(VOCAB) if token % 2 == 0)


@pytest.mark.parametrize("case", first_of(["all", "nothing"], 1))
def test_draws_under_a_constraint_follow_the_masked_distribution(case: str) -> None:
    """The mask applies before top_k, top_p and min_p."""
    params = params_of(case)
    tokens = draws(params, DRAWS // PLACES, TorchOps(), mask=EverySecond())
    seen = np.bincount(tokens.ravel(), minlength=VOCAB)
    shares = distribution(params, lambda token: token % 2 == 0)
    assert surprise(seen, shares) < 1
    assert surprise(seen, distribution(params)) > 1


# Parameters about ends of answers and extra outputs, with the test files that check exact values
EXACT = {
    "max_tokens": "engine/test_constraints.py",
    "stop": "input/tokenizer/test_stop_strings.py",
    "include_stop": "pipeline/test_pipeline.py",
    "ignore_eos": "engine/test_positions.py",
    "seed": "engine/test_sampling_statistics.py",
    "logprobs": "engine/test_logprobs.py",
    "prompt_logprobs": "engine/test_prompt_logprobs.py",
    "repetition_stop": "engine/test_loops.py",
    "bad_words": "test_token_params_job.py",  # drawn as the tokens that they become
    "json_schema": "engine/guided_rows.py",
    "json_object": "test_structured_job.py",
    "regex": "engine/guided_rows.py",
    "choice": "engine/guided_rows.py",
    "grammar": "engine/guided_rows.py",
    "thinking_budget": "engine/test_reasoning.py",
}


def test_every_parameter_that_may_be_set_has_a_test() -> None:
    drawn = {name for case in CASES.values() for name in case} - set(DERIVED)
    assert {one.name for one in fields(SamplingParams)} - set(DERIVED) == drawn | EXACT.keys()
    tests = Path(__file__).parents[1]
    for name, file in EXACT.items():
        assert name in (tests / file).read_text("utf-8"), (name, file)


@pytest.mark.parametrize("case", CASES)
def test_greedy_rows_take_the_most_likely_token(case: str) -> None:
    params = params_of(case, temperature=0.0)
    wanted = int(distribution(params_of(case)).argmax())
    assert draws(params, 1, TorchOps(), 1).tolist() == [[wanted]]


@pytest.mark.parametrize("case", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_filters_equal_transformers(case: str) -> None:
    params = params_of(case)
    warpers = LogitsProcessorList([hf.TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    theirs = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(LOGITS)[None].clone()).softmax(-1)[
        0
    ]
    shares = np.exp(LOGITS.astype(np.float64) / params.temperature)
    np.testing.assert_allclose(filtered(shares / shares.sum(), params), theirs.numpy(), atol=1e-6)
