"""Compares the kernels around sampling with references: masks, penalties (bit by bit), log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import penalties as module
from batchinfer_kernels.gpu.log_probabilities import log_probabilities
from batchinfer_kernels.gpu.mask import mask
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.mask import mask_reference, mask_words
from batchinfer_kernels.penalties import Penalties, penalise_reference
from tests.kernels.gpu.pairs import each_first
from tests.kernels.gpu.poison import poisoned
from tests.kernels.gpu.sampling_cases import moved, penalties_of, some_logits
from tests.kernels.refused import assert_refused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG_TOLERANCE = 1e-5  # of logarithms in float32 of sums in another order


# ---- masks


@pytest.mark.parametrize("vocab", [5, 64, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_equal_their_reference(device, vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-(2**31), 2**31, (3, mask_words(vocab)), generator=generator).int()
    rows = torch.tensor([3, 0, 2], dtype=torch.int32)
    logits = some_logits(4, vocab + 3, 2.0).to(dtype)[:, :vocab]  # strided
    wanted = logits.clone()
    mask_reference(wanted, rows, bits)
    got = logits.to(device)
    mask(got, rows.to(device), bits.to(device))
    assert torch.equal(got.cpu(), wanted)


# ---- penalties


def check_penalties(logits: Tensor, penalties: Penalties) -> None:
    wanted = logits.cpu().clone()
    penalise_reference(wanted, moved(penalties, "cpu"))
    shape = (len(penalties.rows) + 1, logits.shape[1])
    counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    penalise(logits, penalties, counts)
    assert torch.equal(logits.cpu(), wanted)
    assert not counts.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_equal_their_reference(device, dtype):
    histories = [
        ([1, 2, 2, 3], [3, 3, 4, 1]),
        ([7, 7, 7], [8, 8, 9, 3]),
        ([], [6] * 9),
        ([5, 6], []),
        ([], []),
        ([1], [19, 20, -1]),
    ]
    banned = [[3, 4], [], [0], [19, 20, 99], [], [1]]
    penalties = penalties_of(histories, banned, [6, 0, 3, 2, 5, 1], device)
    check_penalties(some_logits(7, 20, 3.0, device).to(dtype), penalties)
    check_penalties(
        some_logits(7, 20, 3.0, device).to(dtype), replace(penalties, banned=penalties.banned[:, :0])
    )


def test_long_histories_take_several_tiles(device, monkeypatch):
    monkeypatch.setattr(module, "TILE", 32)
    random = np.random.default_rng(0)
    histories = [
        (random.integers(0, 50, n).tolist(), random.integers(0, 50, m).tolist())
        for n, m in ((70, 90), (33, 31))
    ]
    check_penalties(
        some_logits(2, 50, 3.0, device), penalties_of(histories, [list(range(40)), [1]], [0, 1], device)
    )


# ---- log-probabilities


def check_log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    with poisoned():
        got = log_probabilities(logits, chosen, most)
    wanted = log_probabilities_reference(logits, chosen, most)
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=LOG_TOLERANCE, rtol=LOG_TOLERANCE, equal_nan=True)
    assert torch.equal(got[2], wanted[2])
    return got


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    each_first(
        DTYPES,
        [(0, 5, 2), (2, 1, 1), (3, 7, 7), (4, 9001, 5), (2, 4096, 0)],
    ),
)
def test_log_probabilities_equal_their_reference(device, dtype, sizes):
    rows, vocab, most = sizes
    chosen = (torch.arange(rows, device=device) * 3000) % vocab
    check_log_probabilities(some_logits(rows, vocab, 3.0, device).to(dtype), chosen, most)


def test_equal_logits_in_many_chunks_go_by_their_ids(device):
    logits = torch.zeros(2, 9000, device=device)
    logits[1, [4, 8999, 5000]] = 2.0
    chosen = torch.tensor([4, 8999], device=device)
    assert check_log_probabilities(logits, chosen, 4)[2].tolist() == [[0, 1, 2, 3], [4, 5000, 8999, 0]]


def test_tokens_without_probability_and_rows_that_are_not_numbers(device):
    logits = some_logits(5, 5000, 1.0, device)
    logits[0] = float("-inf")
    logits[1, 4500] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    logits[3, 4999] = 1.0
    chosen = torch.tensor([-1, -1, 7, 4999, -1], device=device)
    got = check_log_probabilities(logits, chosen, 3)
    assert got[2].tolist()[:4] == [[-1] * 3] * 3 + [[4999, 0, 1]]
    assert got[0].isnan().tolist() == [True, True, True, False, True]
    assert got[1].isnan().any(1).tolist() == [True, True, True, False, False]


def test_log_probabilities_of_a_row_do_not_depend_on_other_rows(device):
    logits, chosen = some_logits(4, 5000, 1.0, device), torch.arange(4, device=device)
    together = log_probabilities(logits, chosen, 3)
    for row in range(4):
        alone = log_probabilities(logits[row : row + 1], chosen[row : row + 1], 3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


# ---- errors, and empty inputs


def test_wrong_operands_are_refused():
    logits, none = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int32)
    penalties = penalties_of([([1], [2])], [[]], [0], "cpu")
    assert_refused("bits", mask, torch.zeros(1, 40), none, torch.zeros(1, 1, dtype=torch.int32))
    for changed in (
        {"starts": none},
        {"repetition": torch.zeros(2)},
        {"banned": torch.zeros(2, 1, dtype=torch.int32)},
        {"tokens": torch.zeros(4, dtype=torch.int64)},
        {"tokens": torch.zeros(2, 2, dtype=torch.int32)},
    ):
        assert_refused("", penalise, logits, replace(penalties, **changed))
    for shape in ((0, 8), (1, 9)):
        assert_refused("counts", penalise, logits, penalties, torch.zeros(shape, dtype=torch.int32))
    for chosen, most in ((torch.zeros(3).long(), 1), (torch.zeros(2), 1), (torch.zeros(2).long(), 9)):
        assert_refused("", log_probabilities, torch.zeros(2, 8), chosen, most)


def test_no_rows(device):
    logits = some_logits(2, 40, 1.0, device)
    before, none = logits.clone(), torch.zeros(0, dtype=torch.int32, device=device)
    mask(logits, none, none.view(0, 1).expand(0, 2))
    penalise(logits, penalties_of([], [], [], device))
    assert torch.equal(logits, before)
