"""Tests that the sampling kernel draws its reference's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import sample as module
from batchinfer_kernels.gpu.sample import sample
from batchinfer_kernels.sample import NO_TOKEN, RowSampling, sample_reference
from tests.kernels import row_by_row
from tests.kernels.gpu.poison import poisoned
from tests.kernels.gpu.sampling_cases import KINDS, moved, random_kinds, row_sampling, some_logits
from tests.kernels.refused import assert_refused

# How far from the border between two tokens a draw has to lie for all implementations to agree on it: rounding of exp
# and of sums in float32, by the sum of all
BORDER = 1e-5


def check(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Compare with the reference, except for draws on a border between tokens."""
    with poisoned():
        got = sample(logits, sampling)
    wanted = sample_reference(logits.cpu(), moved(sampling, "cpu"))
    for row in (got.cpu() != wanted).nonzero().flatten().tolist():
        assert (
            border_distance(logits[row].cpu().float(), moved(sampling, "cpu"), row, int(got[row])) < BORDER
        ), row
    return got


def border_distance(logits: Tensor, sampling: RowSampling, row: int, token: int) -> float:
    """Return the distance of the draw to the token's part of [0, 1)."""
    kept = row_by_row.kept(logits, sampling, row)
    if not kept[token]:
        return 1.0
    ends = (kept.cumsum(-1) / kept.sum())[token], (kept.cumsum(-1) - kept)[token] / kept.sum()
    u = row_by_row.uniform(sampling.keys[row].tolist(), int(sampling.positions[row]))
    return min(abs(float(end) - u) for end in ends)


@pytest.mark.sample(5)
@pytest.mark.parametrize("vocab", [1, 7, 300])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_equals_the_reference(device, vocab, spread):
    kinds = list(KINDS)
    check(some_logits(len(kinds), vocab, spread, device), row_sampling(kinds, device))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("spread", "programs"), [(0.3, 1), (3.0, 2), (3.0, 1024), (6.0, 2)])
def test_rows_of_several_chunks(device, monkeypatch, spread, programs):
    """Each row has `programs` programs, which take the chunks in turn."""
    kinds = [*KINDS, *({"temperature": 0.8, "top_p": share, "top_k": 9001} for share in (0.05, 0.3, 0.6))]
    monkeypatch.setattr(module, "PROGRAMS", programs * len(kinds))
    check(some_logits(len(kinds), 9001, spread, device), row_sampling(kinds, device))


def test_equals_in_several_chunks_rank_by_their_ids(device, monkeypatch):
    kinds = [{"top_k": 3000}, {"top_p": 0.35}, {"top_k": 5000, "top_p": 0.5}, {"min_p": 0.3}]
    monkeypatch.setattr(module, "PROGRAMS", 2 * len(kinds))
    logits = some_logits(1, 9001, 1.0, device).round().repeat(len(kinds), 1)
    check(logits, row_sampling([{"temperature": 1.0, **kind} for kind in kinds], device))


def test_a_bracket_that_is_not_held_at_once_is_narrowed(device, monkeypatch):
    monkeypatch.setattr(module, "HELD", 16)
    monkeypatch.setattr(module, "TILE", 64)
    kinds = [*KINDS, {"temperature": 1.0, "top_k": 150}, {"temperature": 1.0, "top_k": 150, "top_p": 0.9}]
    for spread in (0.5, 4.0):
        check(some_logits(len(kinds), 500, spread, device), row_sampling(kinds, device))


def test_more_equals_than_are_held_at_once_rank_by_their_ids(device, monkeypatch):
    monkeypatch.setattr(module, "HELD", 16)
    logits = some_logits(1, 400, 1.0, device).round().repeat(2, 1)
    for kind in ({"top_k": 30}, {"top_p": 0.3}, {"top_k": 99, "top_p": 0.5, "min_p": 0.4}):
        check(logits, row_sampling([{"temperature": 1.0, **kind}] * 2, device))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference_on_many_rows(device, seed, dtype):
    random = np.random.default_rng(seed)
    kinds = random_kinds(random, 24, top_k=(0, 1, 20, 2000, 9999))
    vocab = int(random.choice([2, 255, 4096, 4097, 20_000]))
    for spread in (0.2, 2.0, 10.0):
        check(some_logits(24, vocab, spread, device, seed).to(dtype), row_sampling(kinds, device, seed))


def test_a_row_does_not_depend_on_other_rows(device):
    kinds = list(KINDS)
    logits, sampling = some_logits(len(kinds), 5000, 1.0, device), row_sampling(kinds, device)
    together = sample(logits, sampling)
    for rows in ([5, 2, 7, 0, 3, 6, 1, 4], [2], [3], [5]):
        alone = sample(logits[rows], sampling.rows(torch.tensor(rows, device=device)))
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 9}])
def test_rows_that_are_not_numbers(device, kind):
    logits = some_logits(6, 4200, 1.0, device)
    logits[0, 4100] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :4000] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 4199] = -5.0
    got = check(logits, row_sampling([kind] * 6, device)).tolist()
    assert got[:3] == [NO_TOKEN] * 3
    assert got[3] >= 4000
    assert got[4] == 4199
    assert torch.equal(sample(logits).cpu(), sample_reference(logits.cpu()))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-44])
def test_the_smallest_temperatures_draw_the_argmax(device, temperature):
    logits = some_logits(2, 50, 10.0, device)
    got = sample(logits, row_sampling([{"temperature": temperature, "top_p": 0.9}] * 2, device))
    assert torch.equal(got, logits.argmax(-1))


def test_equal_logits_go_to_the_lowest_id(device):
    logits = torch.zeros(3, 9000, device=device)
    logits[1, 5000:] = 1.0
    logits[2, [8999, 4097]] = 1.0
    assert sample(logits).tolist() == [0, 5000, 4097]
    first = row_sampling([{"temperature": 1.0, "top_k": 1}] * 3, device)
    assert sample(logits, first).tolist() == [0, 5000, 4097]


def test_rows_may_be_strided_and_out_given(device):
    logits = some_logits(5, 100, 1.0, device)
    out = torch.full((3,), -7, device=device)
    assert sample(logits[::2, 10:90], out=out) is out
    assert torch.equal(out, logits[::2, 10:90].argmax(-1))
    assert sample(logits[:0]).shape == (0,)


def test_wrong_operands_are_refused():
    logits, sampling = torch.zeros(2, 8), row_sampling([{}, {}])
    for wrong in (logits.double(), torch.zeros(3, 8), torch.zeros(8, 2).T, logits[:, :0]):
        assert_refused("", sample, wrong, sampling)
    assert_refused("at most", sample, torch.zeros(2, 1).expand(2, (1 << 19) + 1).contiguous(), sampling)
    for changed in (
        {"top_k": torch.zeros(2, dtype=torch.int64)},
        {"top_p": torch.zeros(2)},
        {"keys": torch.zeros(2, 2, dtype=torch.int32)},
    ):
        assert_refused("", sample, logits, replace(sampling, **changed))
