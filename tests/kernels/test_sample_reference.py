"""The references for sampling choose what the engine's sampler chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.engine.sampler import Sampler
from batchinfer.engine.sequence import Sequence
from batchinfer.request import Request, SamplingParams
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.sample import NO_TOKEN, RowSampling, sample_reference

ROWS, VOCAB = 200, 60


def sequences(seed: int) -> list[Sequence]:
    """Rows with parameters of all kinds, some tokens said before."""
    random, found = np.random.default_rng(seed), []
    for row in range(ROWS):
        params = SamplingParams(
            max_tokens=99,
            min_tokens=int(random.integers(0, 6)),
            temperature=float(random.choice([0.0, 0.5, 1.0, 3.0])),
            top_k=int(random.choice([0, 1, 7, 100])),
            top_p=float(random.choice([1.0, 0.2, 0.9])),
            min_p=float(random.choice([0.0, 0.1, 1.0])),
            stop_token_ids=(3, 70),
            repetition_penalty=float(random.choice([1.0, 0.8, 1.9])),
            presence_penalty=float(random.choice([0.0, -0.5, 1.5])),
            frequency_penalty=float(random.choice([0.0, 0.3])),
        )
        prompt = random.integers(0, VOCAB, random.integers(1, 9)).astype(np.int32)
        sequence = Sequence.of(Request(random.bytes(32), prompt, params), 1000, None, 0.0)
        sequence.tokens.extend(random.integers(0, VOCAB, row % 9).tolist())
        found.append(sequence)
    return found


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def penalties_of(rows: list[Sequence], eos: list[int]) -> Penalties:
    params = [s.request.params for s in rows]
    starts = np.cumsum([0, *(len(s.tokens) for s in rows)])[:-1]
    banned = [
        [*p.stop_token_ids, *eos] if s.output_length < p.min_tokens else [-1] * (2 + len(eos))
        for s, p in zip(rows, params, strict=True)
    ]
    return Penalties(
        ints(list(range(len(rows)))),
        ints([token for s in rows for token in s.tokens]),
        torch.from_numpy(starts),
        ints([s.prompt_length for s in rows]),
        ints([len(s.tokens) for s in rows]),
        torch.tensor([p.repetition_penalty for p in params]),
        torch.tensor([p.presence_penalty for p in params]),
        torch.tensor([p.frequency_penalty for p in params]),
        torch.tensor(banned, dtype=torch.int32),
    )


def sampling_of(rows: list[Sequence]) -> RowSampling:
    params = [s.request.params for s in rows]
    words = np.stack([np.frombuffer(s.request.key[:16], "<i4") for s in rows])
    return RowSampling(
        torch.tensor([p.temperature for p in params]),
        ints([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        torch.from_numpy(words.copy()),
        ints([s.output_length for s in rows]),
    )


@pytest.mark.parametrize("seed", range(3))
def test_all_steps_are_those_of_the_engine(seed):
    rows = sequences(seed)
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[5, 7] = float("nan")
    theirs = logits.clone()
    wanted = Sampler(frozenset({1, 2})).sample(theirs, rows)
    penalise_reference(logits, penalties_of(rows, [1, 2]))
    torch.testing.assert_close(logits, theirs, atol=0, rtol=0, equal_nan=True)
    assert sample_reference(logits, sampling_of(rows)).tolist() == wanted
    assert wanted[5] == NO_TOKEN


def test_log_probabilities_by_hand():
    logits = torch.tensor([[0.0, 0.0, float("-inf")], [1.0, 2.0, 0.5]]).log()
    of_chosen, top, ids = log_probabilities_reference(logits[1:], torch.tensor([2]), 2)
    torch.testing.assert_close(of_chosen.exp(), torch.tensor([0.5 / 3.5]))
    torch.testing.assert_close(top.exp(), torch.tensor([[2 / 3.5, 1 / 3.5]]))
    assert ids.tolist() == [[1, 0]]
    broken = log_probabilities_reference(logits[:1], torch.tensor([NO_TOKEN]), 1)
    assert broken[0].isnan().all()
    assert broken[1].isnan().all()
    assert broken[2].tolist() == [[NO_TOKEN]]
