"""Tests draws, penalties, masks and other changes of logits: known values, and independence of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.core.content_root import ContentRoots
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.sampling_writer import SamplingWriter
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import SamplingPlan
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.sample import NO_TOKEN
from tests.batchinfer.engine.small_engine import request


def make_sequence(key: int, prompt: list[int], output: list[int], most: int = 99, **params: Any) -> Sequence:
    sequence = Sequence.of(request(key, prompt, most, **params), ContentRoots(1000), None, 0.0)
    sequence.tokens.extend(output)
    return sequence


def plan_of(rows: list[Sequence], *eos: int) -> SamplingPlan:
    return SamplingWriter(frozenset(eos)).of(rows, [])


def chosen(logits: torch.Tensor, rows: list[Sequence], *eos: int) -> list[int]:
    return Sampler(frozenset(eos)).sample(TorchOps(), logits, plan_of(rows, *eos)).tokens.tolist()


def test_min_tokens_bans_eos_and_stop_tokens_until_reached():
    logits = torch.zeros(1, 6)
    logits[0, 5], logits[0, 4], logits[0, 1] = 9.0, 8.0, 1.0
    early = make_sequence(0, [1], [2], min_tokens=2, stop_token_ids=(4,))
    assert chosen(logits.clone(), [early], 5) == [1]
    late = make_sequence(0, [1], [2, 2], min_tokens=2, stop_token_ids=(4,))
    assert chosen(logits.clone(), [late], 5) == [5]


def test_biases_are_added_before_penalties_and_only_to_their_rows():
    """Micro-batches add biases to a part of the rows. If a row's maximum logits are equal, it takes the
    lowest token."""
    torch.manual_seed(7)
    logits = torch.randn(4, 20)
    rows = [
        make_sequence(0, [1], [], logit_bias=((3, 50.0), (19, -100.0))),
        make_sequence(1, [1], []),
        make_sequence(2, [3], [3], logit_bias=((3, -9.0),), repetition_penalty=2.0),
        make_sequence(3, [1], [], temperature=0.5, logit_bias=((0, 90.0), (5, 90.0))),
    ]
    wanted = logits.clone()
    wanted[0, 3] += 50
    wanted[0, 19] -= 100
    wanted[2, 3] = (wanted[2, 3] - 9) * 2
    wanted[3, [0, 5]] += 90
    plan, got = plan_of(rows), logits.clone()
    tokens = Sampler(frozenset()).sample(TorchOps(), got, plan).tokens
    assert torch.equal(got, wanted)
    assert tokens[:3].tolist() == wanted[:3].argmax(-1).tolist()
    assert not Sampler(frozenset()).tries_argmax(plan_of(rows[:1]))
    for first, end in ((0, 4), (0, 2), (1, 2), (2, 4)):
        part = logits[first:end].clone()
        found = Sampler(frozenset()).sample(TorchOps(), part, plan.part(first, end)).tokens
        assert torch.equal(part, wanted[first:end])
        assert torch.equal(found, tokens[first:end])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_allowed_tokens_get_no_other_tokens(temperature):
    """With penalties, biases and masks. Logits of other rows are unchanged. A mask without an allowed token
    leaves none."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(6))
    rows = [
        make_sequence(0, [1], [], allowed_token_ids=(3, 39), temperature=temperature),
        make_sequence(1, [1], [], temperature=temperature, most=98),
        make_sequence(2, [3], [3], allowed_token_ids=(3, 4), repetition_penalty=1e2, logit_bias=((3, 20.0),)),
        make_sequence(3, [1], [], allowed_token_ids=(4, 9), most=5, temperature=temperature),
        make_sequence(4, [1], [], allowed_token_ids=(30, 9), most=5, temperature=temperature),
    ]
    masks = Multiples(rows)
    for row in rows[:3]:
        row.request = replace(row.request, params=replace(row.request.params, max_tokens=98))
    plan, got = masks.plan(), logits.clone()
    tokens = Sampler(frozenset(), masks).sample(TorchOps(), got, plan).tokens.tolist()
    assert tokens[0] in (3, 39)
    assert torch.equal(got[1], logits[1])
    assert tokens[2] == (3 if (logits[2, 3] + 20) / 100 > logits[2, 4] else 4)
    assert tokens[3:] == [NO_TOKEN, 30]
    assert (got[0].isfinite().nonzero()[:, 0]).tolist() == [3, 39]
    part, plan = logits[2:3].clone(), plan.part(2, 3)
    assert Sampler(frozenset(), masks).sample(TorchOps(), part, plan).tokens.tolist() == tokens[2:3]


def test_rows_without_finite_logits_are_recognised():
    logits = torch.zeros(3, 4)
    logits[1] = float("nan")
    logits[2, 0] = float("inf")
    rows = [make_sequence(i, [1], [], temperature=t) for i, t in enumerate((0.0, 1.0, 0.0))]
    assert chosen(logits, rows) == [0, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-46, 5e-324])
def test_the_smallest_temperatures_draw_the_argmax(temperature):
    """Dividing by a tiny temperature gives infinity, which once drew a token beyond the vocabulary."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 10
    wanted = logits.argmax(-1).tolist()
    rows = [make_sequence(i, [1], [], temperature=temperature) for i in range(3)]
    assert chosen(logits, rows) == wanted


@dataclass(frozen=True)
class Multiples:
    """A mask that allows multiples of a row's max_tokens above its last token, for rows with odd max_tokens."""

    rows: list[Sequence]

    def plan(self, which: slice = slice(None)) -> SamplingPlan:
        for number, row in enumerate(self.rows):
            row.mask = number if row.request.params.max_tokens % 2 == 1 else None
        return plan_of(self.rows[which])

    def fill(self, masks: list[int], bits: np.ndarray) -> None:
        for sequence, words in zip([self.rows[mask] for mask in masks], bits, strict=True):
            for token in range(32 * len(words)):
                if token % sequence.request.params.max_tokens or token <= sequence.tokens[-1]:
                    words[token // 32] &= ~np.int32(1 << token % 32) if token % 32 < 31 else 0x7FFFFFFF


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_get_only_allowed_tokens(temperature):
    logits = torch.randn(60, 71, generator=torch.Generator().manual_seed(3))
    rows = [make_sequence(i, [i % 5], [], temperature=temperature, most=3 + i % 3) for i in range(60)]
    free = chosen(logits.clone(), rows)
    masks = Multiples(rows)
    sampler, plan = Sampler(frozenset(), masks), masks.plan()
    assert not sampler.tries_argmax(plan)
    assert sampler.tries_argmax(plan_of([make_sequence(0, [1], [], most=4)]))
    got = sampler.sample(TorchOps(), logits.clone(), plan).tokens.tolist()
    for token, unmasked, row, scores in zip(got, free, rows, logits, strict=True):
        most = row.request.params.max_tokens
        if most % 2 == 0:
            assert token == unmasked
            continue
        allowed = [t for t in range(71) if t % most == 0 and t > row.tokens[-1]]
        assert token in allowed
        if temperature == 0:
            assert token == max(allowed, key=lambda t: float(scores[t]))


def test_a_mask_is_filled_only_if_the_argmax_is_not_allowed():
    """Checked on the host. A row whose last token would have been another one without its mask gets its mask
    at once."""
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(5))
    logits[::3, 30], logits[1::3, 31] = 9.0, 9.0
    rows = [make_sequence(i, [1], [], temperature=0.0, most=2 if i == 8 else 5) for i in range(9)]
    rows[6].masking.followed = False
    filled: list[list[int]] = []

    class Recording(Multiples):
        def fill(self, masks: list[int], bits: np.ndarray) -> None:
            filled.append(list(masks))
            super().fill(masks, bits)

        def allowed(self, masks: list[int], tokens: list[int]) -> list[bool]:
            assert 6 not in masks
            assert 8 not in masks, "it has no mask"
            return [token % 5 == 0 for token in tokens]

    plan = Recording(rows).plan()
    always = Sampler(frozenset(), Recording(rows)).sample(TorchOps(), logits.clone(), plan)
    assert filled == [list(range(8))]
    filled.clear()
    checked = Sampler(frozenset(), Recording(rows), on_host=True).sample(TorchOps(), logits.clone(), plan)
    assert filled[0] == [6]
    assert 0 not in filled[1]
    assert 1 in filled[1]
    assert len(filled) == 2
    assert checked.tokens.tolist() == always.tokens.tolist()
    assert checked.masked.rows == always.masked.rows == list(range(8))
    assert checked.masked.barred.tolist() == always.masked.barred.tolist()
    barred = checked.masked.of_rows(checked.masked.barred.numpy())
    assert [barred[row] for row in range(2)] == [False, True]
    assert not barred[6], "without its mask it would have taken the same token"
