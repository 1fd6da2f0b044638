"""Batched sampling chooses the same tokens as row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer_kernels import sample as module
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.mask import mask_reference, mask_words
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.philox import philox, uniforms
from batchinfer_kernels.sample import NO_TOKEN, sample_reference
from tests.kernels import row_by_row
from tests.kernels.gpu.sampling_cases import random_kinds, row_sampling
from tests.kernels.refused import assert_refused


def test_philox_known_answers():
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    counter = [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]
    key = [[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]]
    wanted = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox(torch.tensor(counter), torch.tensor(key)).tolist() == wanted


def test_uniforms_depend_on_key_and_position_alone():
    keys = torch.randint(-(2**31), 2**31, (8, 4), generator=torch.Generator().manual_seed(0)).int()
    positions = torch.tensor([0, 1, 77, 2**31 - 1, 0, 1, 2, 3], dtype=torch.int32)
    together = uniforms(keys, positions)
    alone = [row_by_row.uniform(k, p) for k, p in zip(keys.tolist(), positions.tolist(), strict=True)]
    assert together.tolist() == alone
    many = uniforms(keys[:1].expand(20_000, 4), torch.arange(20_000, dtype=torch.int32))
    assert len(many.unique()) == 20_000
    assert 0 <= many.min() < many.max() < 1
    assert abs(float(many.mean()) - 0.5) < 0.01


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("candidates", [(1024, 16384), (8, 50), (1, 2)])
def test_tokens_are_those_chosen_row_by_row(seed, candidates, monkeypatch):
    """More rows than one batch draws, nuclei larger than the sorted candidates, and rows full of ties."""
    monkeypatch.setattr(module, "CANDIDATES", candidates)
    logits = torch.randn(70, 130, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::5] = logits[::5].round()
    logits[5, 7] = float("nan")
    logits[6, 7:] = float("-inf")
    sampling = row_sampling(random_kinds(np.random.default_rng(seed), 70, (0, 1, 7, 60, 5000)), seed=seed)
    wanted = row_by_row.sample(logits, sampling)
    assert torch.equal(sample_reference(logits, sampling), wanted)
    assert wanted[5] == NO_TOKEN
    for row in range(70):
        one = torch.tensor([row])
        assert torch.equal(sample_reference(logits[one], sampling.rows(one)), wanted[one]), "alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_by_hand(dtype):
    """Tokens 1 and 2 were in the prompt, 2 and 3 (twice) in the answer, 4 and 5 are banned. Other rows have none."""
    tokens = torch.tensor([5, 1, 2, -1, 99, 3, 2, 3, -1, 6, 5], dtype=torch.int32)
    integers = (torch.tensor([value], dtype=torch.int32) for value in (4, 9))
    floats = (torch.tensor([value]) for value in (2.0, 1.0, 0.25))
    banned = torch.tensor([[4, -1, 5, 6]], dtype=torch.int32)
    row = torch.tensor([1], dtype=torch.int32)
    penalties = Penalties(row, tokens, torch.tensor([1]), *integers, *floats, banned)
    logits = torch.tensor([[8.0, 8.0, 8.0, -8.0, 8.0, 8.0]] * 2).to(dtype)
    penalise_reference(logits, penalties)
    assert logits.tolist() == [[8, 8, 8, -8, 8, 8], [8, 4, 2.75, -17.5, float("-inf"), float("-inf")]]
    once = replace(penalties, repetition=torch.ones(1), banned=banned[:, :0])
    penalise_reference(logits[:1], replace(once, rows=torch.zeros_like(row)))
    assert logits[0].tolist() == [8, 8, 6.75, -9.5, 8, 8]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_by_hand(vocab):
    random = np.random.default_rng(vocab)
    allowed = random.random((3, vocab)) < 0.5
    bits = np.zeros((3, mask_words(vocab)), np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        bits[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    logits = torch.randn(5, vocab)
    got = logits.clone()
    rows = [4, 0, 3]
    mask_reference(got, torch.tensor(rows, dtype=torch.int32), torch.from_numpy(bits.view(np.int32)))
    wanted = logits.clone()
    wanted[rows] = wanted[rows].masked_fill(~torch.from_numpy(allowed), float("-inf"))
    assert torch.equal(got, wanted)


def test_masks_that_do_not_fit_are_refused():
    logits, rows, bits = (
        torch.zeros(3, 40),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32),
    )
    for wrong in ((rows, bits), (rows[:1], bits[:, :1]), (rows[:1], bits.long())):
        assert_refused("bits", mask_reference, logits, *wrong)


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
