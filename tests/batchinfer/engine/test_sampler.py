"""Draws, penalties and filters: known vectors, distributions, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from batchinfer.engine.draws import philox, uniforms
from batchinfer.engine.sampler import Sampler, keep_top
from batchinfer.engine.sequence import Sequence
from batchinfer.ops.interface import NO_TOKEN
from batchinfer.request import Request, SamplingParams


def make(key: int, prompt: list[int], output: list[int], **params) -> Sequence:
    request = Request(
        np.random.default_rng(key).bytes(32),
        np.array(prompt, np.int32),
        SamplingParams(max_tokens=99, **params),
    )
    sequence = Sequence.of(request, 1000, None, 0.0)
    sequence.tokens.extend(output)
    return sequence


def test_philox_known_answers():
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    counter = np.array(
        [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32
    )
    key = np.array([[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]], np.uint32)
    wanted = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox(counter, key).tolist() == wanted


def test_uniforms_depend_on_key_position_and_sample_alone():
    keys = [bytes([i]) * 32 for i in range(5)]
    together = uniforms(keys, [0, 1, 2, 3, 4])
    alone = [uniforms([k], [i])[0] for i, k in enumerate(keys)]
    assert together.tolist() == alone
    assert (
        len({*uniforms([keys[0]] * 50, list(range(50))), *uniforms([keys[0]] * 50, list(range(50)), 1)})
        == 100
    )
    many = uniforms([keys[0]] * 20_000, list(range(20_000)))
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.6, "min_p": 0.05},
    ],
)
def test_sampled_frequencies_follow_transformers_warpers(params):
    torch.manual_seed(5)
    logits = torch.randn(12) * 2
    warpers = LogitsProcessorList([hf.TemperatureLogitsWarper(params["temperature"])])
    if "top_k" in params:
        warpers.append(hf.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(hf.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(hf.MinPLogitsWarper(params["min_p"]))
    wanted = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone()).softmax(-1)[0]
    rows = [make(i, [1], [], **params) for i in range(4000)]
    tokens = Sampler(frozenset()).sample(logits.expand(4000, -1).clone(), rows)
    seen = torch.bincount(torch.tensor(tokens), minlength=12) / 4000
    assert (seen[wanted == 0] == 0).all()
    torch.testing.assert_close(seen, wanted, atol=0.03, rtol=0)


def test_a_row_draws_the_same_token_in_any_company():
    torch.manual_seed(1)
    logits = torch.randn(40, 50)
    kinds = [{"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.7}, {}, {"temperature": 2.0, "top_k": 3}]
    rows = [make(i, [1, 2], [3] * (i % 4), **kinds[i % 4]) for i in range(40)]
    sampler = Sampler(frozenset())
    together = sampler.sample(logits.clone(), rows)
    alone = [sampler.sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(40)]
    assert together == alone


def test_penalties_equal_transformers_and_their_definitions():
    torch.manual_seed(2)
    logits = torch.randn(1, 20)
    sequence = make(0, [1, 2, 2], [3, 3, 4], repetition_penalty=1.7)
    wanted = hf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 3, 3, 4]]), logits.clone())
    got = logits.clone()
    Sampler(frozenset())._reshape(got, [sequence])
    torch.testing.assert_close(got, wanted)
    sequence = make(0, [1, 2, 2], [3, 3, 4], presence_penalty=0.5, frequency_penalty=0.25)
    got = logits.clone()
    Sampler(frozenset())._reshape(got, [sequence])
    lowered = (logits - got)[0]
    assert lowered[3].item() == pytest.approx(0.5 + 2 * 0.25)
    assert lowered[4].item() == pytest.approx(0.5 + 0.25)
    assert lowered[1].item() == 0


def test_min_tokens_bans_eos_and_stop_tokens_until_reached():
    logits = torch.zeros(1, 6)
    logits[0, 5], logits[0, 4], logits[0, 1] = 9.0, 8.0, 1.0
    sampler = Sampler(frozenset({5}))
    early = make(0, [1], [2], min_tokens=2, stop_token_ids=(4,))
    assert sampler.sample(logits.clone(), [early]) == [1]
    late = make(0, [1], [2, 2], min_tokens=2, stop_token_ids=(4,))
    assert sampler.sample(logits.clone(), [late]) == [5]


def test_rows_without_finite_logits_are_told_apart():
    logits = torch.zeros(3, 4)
    logits[1] = float("nan")
    logits[2, 0] = float("inf")
    rows = [make(i, [1], [], temperature=t) for i, t in enumerate((0.0, 1.0, 0.0))]
    assert Sampler(frozenset()).sample(logits, rows) == [0, NO_TOKEN, NO_TOKEN]


def test_nucleus_always_keeps_the_argmax():
    probabilities = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    keep_top(probabilities, [0], [1e-9])
    assert probabilities.tolist() == [[0.0, 0.5, 0.0]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-46, 5e-324])
def test_the_smallest_temperatures_draw_the_argmax(temperature):
    """Divided by it a score is infinite: a token beyond the vocabulary was drawn, which ends the engine."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 10
    wanted = logits.argmax(-1).tolist()
    rows = [make(i, [1], [], temperature=temperature) for i in range(3)]
    assert Sampler(frozenset()).sample(logits, rows) == wanted
