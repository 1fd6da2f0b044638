"""The penalty kernel changes logits as its reference does, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import penalties as module
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.penalties import Penalties, penalise_reference
from tests.kernels.gpu.sampling_cases import moved, penalties_of, some_logits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(logits: Tensor, penalties: Penalties) -> None:
    wanted = logits.cpu().clone()
    penalise_reference(wanted, moved(penalties, "cpu"))
    shape = (len(penalties.rows) + 1, logits.shape[1])
    counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    penalise(logits, penalties, counts)
    assert torch.equal(logits.cpu(), wanted)
    assert not counts.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(device, dtype):
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
    check(some_logits(7, 20, 3.0, device).to(dtype), penalties)
    check(some_logits(7, 20, 3.0, device).to(dtype), replace(penalties, banned=penalties.banned[:, :0]))


def test_long_histories_take_several_tiles(device, monkeypatch):
    monkeypatch.setattr(module, "TILE", 32)
    random = np.random.default_rng(0)
    histories = [
        (random.integers(0, 50, n).tolist(), random.integers(0, 50, m).tolist())
        for n, m in ((70, 90), (33, 31))
    ]
    check(some_logits(2, 50, 3.0, device), penalties_of(histories, [list(range(40)), [1]], [0, 1], device))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference_on_many_rows(device, seed):
    """Up to 3 tiles of tokens a row, of which the interpreter passes over some hundred a second."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 1500, (9, 2))
    histories = [tuple(random.integers(0, 4000, n).tolist() for n in pair) for pair in sizes]
    banned = [random.integers(0, 4000, random.integers(0, 9)).tolist() for _ in range(9)]
    check(
        some_logits(9, 4000, 3.0, device, seed),
        penalties_of(histories, banned, random.permutation(9).tolist(), device),
    )


def test_nothing_to_do(device):
    logits = some_logits(2, 20, 1.0, device)
    before = logits.clone()
    penalise(logits, penalties_of([], [], [], device))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "changed",
    [
        {"starts": torch.zeros(1, dtype=torch.int32)},
        {"repetition": torch.zeros(2)},
        {"banned": torch.zeros(2, 1, dtype=torch.int32)},
        {"tokens": torch.zeros(4, dtype=torch.int64)},
        {"tokens": torch.zeros(2, 2, dtype=torch.int32)},
    ],
)
def test_what_does_not_fit_is_refused(changed):
    with pytest.raises(ValueError):
        penalise(torch.zeros(1, 8), replace(penalties_of([([1], [2])], [[]], [0], "cpu"), **changed))


@pytest.mark.parametrize("shape", [(0, 8), (1, 9)])
def test_counts_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="counts"):
        penalise(
            torch.zeros(1, 8),
            penalties_of([([1], [2])], [[]], [0], "cpu"),
            torch.zeros(shape, dtype=torch.int32),
        )
