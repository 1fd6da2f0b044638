"""Log-probabilities equal those of torch's log-softmax and sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu.log_probabilities import log_probabilities
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from tests.kernels.gpu.pairs import each_first
from tests.kernels.gpu.poison import poisoned
from tests.kernels.gpu.sampling_cases import some_logits

TOLERANCE = 1e-5  # of logarithms in float32 of sums in another order


def check(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    with poisoned():
        got = log_probabilities(logits, chosen, most)
    wanted = log_probabilities_reference(logits, chosen, most)
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
    assert torch.equal(got[2], wanted[2])
    return got


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    each_first(
        [torch.float32, torch.float16, torch.bfloat16],
        [(0, 5, 2), (2, 1, 1), (3, 7, 7), (4, 9001, 5), (2, 4096, 0)],
    ),
)
def test_equals_the_reference(device, dtype, sizes):
    rows, vocab, most = sizes
    chosen = (torch.arange(rows, device=device) * 3000) % vocab
    check(some_logits(rows, vocab, 3.0, device).to(dtype), chosen, most)


def test_equals_in_many_chunks_go_by_their_ids(device):
    logits = torch.zeros(2, 9000, device=device)
    logits[1, [4, 8999, 5000]] = 2.0
    chosen = torch.tensor([4, 8999], device=device)
    assert check(logits, chosen, 4)[2].tolist() == [[0, 1, 2, 3], [4, 5000, 8999, 0]]


def test_tokens_without_probability_and_rows_that_are_not_numbers(device):
    logits = some_logits(5, 5000, 1.0, device)
    logits[0] = float("-inf")
    logits[1, 4500] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    logits[3, 4999] = 1.0
    chosen = torch.tensor([-1, -1, 7, 4999, -1], device=device)
    got = check(logits, chosen, 3)
    assert got[2].tolist()[:4] == [[-1] * 3] * 3 + [[4999, 0, 1]]
    assert got[0].isnan().tolist() == [True, True, True, False, True]
    assert got[1].isnan().any(1).tolist() == [True, True, True, False, False]


def test_a_row_does_not_depend_on_the_others(device):
    logits, chosen = some_logits(4, 5000, 1.0, device), torch.arange(4, device=device)
    together = log_probabilities(logits, chosen, 3)
    for row in range(4):
        alone = log_probabilities(logits[row : row + 1], chosen[row : row + 1], 3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [2, 4095, 4097, 32_000, 131_072])
def test_equals_the_reference_at_all_sizes(device, vocab):
    check(some_logits(3, vocab, 4.0, device), torch.tensor([0, 1, vocab - 1], device=device), min(vocab, 20))


@pytest.mark.parametrize(
    ("chosen", "most"), [(torch.zeros(3).long(), 1), (torch.zeros(2), 1), (torch.zeros(2).long(), 9)]
)
def test_what_does_not_fit_is_refused(chosen, most):
    with pytest.raises(ValueError):
        log_probabilities(torch.zeros(2, 8), chosen, most)
