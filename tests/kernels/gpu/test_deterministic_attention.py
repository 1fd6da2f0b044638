"""Tests row-invariance: a query's bits are equal alone and in any batch, in any chunks, with or without a
shared prefix."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import attention_launch
from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.decode_attention import decode_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import ScoreRules
from tests.kernels.cpu_steps import rules_of
from tests.kernels.gpu.attention_cases import Case, assert_near, paged_case, sharing, splits_of

BLOCK = 16
SEGMENT = 128  # short sequences have several


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention_launch", "attention_plan", "attention_splits", "part_room"):
        monkeypatch.setattr(f"batchinfer_kernels.gpu.{module}.SEGMENT", SEGMENT)
    monkeypatch.setattr("batchinfer_kernels.gpu.paged_attention.prefill_attention", _prefill)
    assert attention_launch.SEGMENT == SEGMENT


def _prefill(*arguments, **options) -> Tensor:
    return prefill_attention(*arguments, **options, segment=SEGMENT)


def step(case: Case, chunks, rows, q, shared=(), window=None, room=None, **extras) -> Tensor:
    """Run the tokens of `chunks`, (queries, context), of the sequences `rows`."""
    shape = AttentionShape(q.dtype, q.shape[1], case.k.shape[1], q.shape[2], deterministic=True)
    lens = ([n for n, _ in chunks], [c for _, c in chunks])
    plan = plan_attention(*lens, shape, q.device, shared, room, [window])
    table = case.table[rows].contiguous()
    return paged_attention(
        q, case.k, case.v, table, plan, rules_of(0.2, window, extras), **case.scaling, **extras
    )


def whole(case: Case, row: int, window=None, **extras) -> Tensor:
    """Return the attention of all queries of a sequence in one chunk, in its own batch."""
    first = sum(case.queries[:row])
    q = case.q[first : first + case.queries[row]]
    return step(case, [(case.queries[row], case.contexts[row])], [row], q, window=window, **extras)


VARIANTS = [
    pytest.param(torch.float32, None, {}, id="float32", marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, None, {"window": 150}, id="bfloat16-window"),
    pytest.param(torch.float16, torch.int8, {"soft_cap": 2.0}, id="float16-int8-cap"),
]


@pytest.mark.parametrize(("dtype", "cache_dtype", "extras"), VARIANTS)
def test_bits_are_equal_alone_in_a_batch_in_chunks_and_one_by_one(dtype, cache_dtype, extras, device) -> None:
    sinks = torch.linspace(-1, 1, 4, device=device)
    case = paged_case([(290, 290), (40, 300)], dtype=dtype, cache_dtype=cache_dtype, device=device)
    extras = {**extras, "sinks": sinks}
    alone = whole(case, 0, **extras)
    wanted, _ = case.reference(**extras)
    assert_near(alone, wanted[:290], dtype)
    together = step(case, case.chunks, [0, 1], case.q, **extras)
    assert torch.equal(together[:290], alone)
    for first, end in pairwise((0, 1, 129, 290)):
        chunk = step(case, [(end - first, end)], [0], case.q[first:end], **extras)
        assert torch.equal(chunk, alone[first:end]), (first, end)
    for at in (0, 127, 128, 289):
        chunks = [(1, 299), (1, at + 1), (2, 280)]
        q = torch.cat((case.q[-2:-1], case.q[at : at + 1], case.q[-3:-1]))
        assert torch.equal(step(case, chunks, [1, 0, 1], q, **extras)[1], alone[at]), at
        assert torch.equal(step(case, [(1, at + 1)], [0], case.q[at : at + 1], **extras)[0], alone[at]), at


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "cache_dtype", "extras"), VARIANTS)
def test_prefixes_shared_or_not(dtype, cache_dtype, extras, device) -> None:
    prefixes = [([0, 1, 2, 3], 128), ([1, 2, 3], 256)]
    lengths = (200, 300, 257, 400)
    case = paged_case([(1, n) for n in lengths], dtype=dtype, cache_dtype=cache_dtype, device=device)
    sharing(case, BLOCK, prefixes)
    shared = [SharedPrefix(*p) for p in prefixes]
    rows = [0, 1, 2, 3]
    together = step(case, case.chunks, rows, case.q, shared, **extras)
    assert_near(together, case.reference(**extras)[0], dtype)
    assert torch.equal(together, step(case, case.chunks, rows, case.q, **extras))
    assert torch.equal(together, step(case, case.chunks, rows, case.q, shared[:1], **extras))
    for row in rows:
        assert torch.equal(together[row], whole(case, row, **extras)[0])
    order = random.Random(1).sample(rows, 4)
    turned = step(case, [case.chunks[i] for i in order], order, case.q[order], **extras)
    assert torch.equal(turned, together[order])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "cache_dtype", "extras"), VARIANTS)
def test_a_few_queries_together(dtype, cache_dtype, extras, device) -> None:
    """Like a graph that verifies drafts: next to other rows, over segments that only some queries see."""
    case = paged_case([(290, 290), (40, 300)], dtype=dtype, cache_dtype=cache_dtype, device=device)
    alone = whole(case, 0, **extras)
    other = whole(case, 1, **extras)
    room = Room(400, sharing=None, queries=8)
    for first, end in ((0, 1), (124, 131), (254, 257), (275, 283), (282, 290)):
        q = torch.cat((case.q[290:293], case.q[first:end], case.q[:1]))
        chunks = [(3, 263), (end - first, end), (1, 0), (0, 0)]
        found = step(case, chunks, [1, 0, 0, 0], q, room=room, **extras)
        assert torch.equal(found[3 : 3 + end - first], alone[first:end]), (first, end)
        assert torch.equal(found[:3], other[:3])
        assert not found[-1].any()


def test_room_for_longer_contexts_changes_nothing(device) -> None:
    """As in a graph that was captured for longer contexts. A single segment is folded like several."""
    case = paged_case([(1, 100), (1, 128), (1, 129)], device=device)
    lengths = torch.tensor(case.contexts, dtype=torch.int32, device=device)
    found, short, graph = (
        decode_attention(
            case.q[:n], case.k, case.v, case.table[:n], lengths[:n],
            splits_of(case.contexts[:n], case, deterministic=True, longest=longest), ScoreRules(0.2),
            deterministic=True,
        )
        for n, longest in ((3, None), (2, None), (3, 1000))
    )  # fmt: skip
    assert torch.equal(found, graph)
    assert torch.equal(short, found[:2])
