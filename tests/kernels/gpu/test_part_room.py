"""Tests memory for partial results: at most the reserved size for any sharing, and none without sharing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.gpu import attention_launch, part_room
from batchinfer_kernels.gpu.attention_launch import SEGMENT
from batchinfer_kernels.gpu.attention_parts import Parts
from batchinfer_kernels.gpu.attention_plan import (
    AttentionShape,
    LaunchPlan,
    Room,
    SharedPrefix,
    plan_attention,
)
from tests.examples import examples

CPU = torch.device("cpu")
LLAMA_8B = {"dtype": torch.bfloat16, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
A_PART = 32 * (128 + 1) * 4  # bytes: values and a log-sum-exp of each head


@pytest.fixture(autouse=True)
def _an_h200() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_launch, part_room):
            patch.setattr(module, "processors", lambda _: 132)
        yield


def planned(
    contexts: list[int],
    shared: list[SharedPrefix],
    longest: int | None,
    deterministic: bool = False,
    queries: list[int] | None = None,
) -> LaunchPlan:
    room = None if longest is None else Room(longest, sharing=None, queries=8 if queries else 1)
    shape = AttentionShape(**LLAMA_8B, deterministic=deterministic)
    return plan_attention(queries or [1] * len(contexts), contexts, shape, CPU, shared, room)


def part_bytes(plan: LaunchPlan) -> int:
    """Return the bytes that a layer's attention allocates."""
    q = torch.empty(1, 32, 128, device="meta")
    splits, shared = plan.splits_of(None), 0 if plan.prefixes is None else plan.prefixes.parts
    if splits.whole and not shared:
        return 0
    assert splits.places[-1] <= splits.parts
    parts = Parts.of(q, shared, splits.parts)
    return parts.values.nbytes + parts.lses.nbytes


def test_rows_without_shared_prefixes_take_no_memory_of_other_rows() -> None:
    """4 of 1,024 rows share 16,384 keys in 32 parts each. Memory for 32 parts of every row was 541 MB."""
    contexts, shared = [16_400] * 4 + [500] * 1020, [SharedPrefix([0, 1, 2, 3], 16_384)]
    for longest in (None, 16_400):
        plan = planned(contexts, shared, longest)
        assert plan.prefixes is not None
        assert plan.prefixes.places.diff().tolist() == [32] * 4 + [0] * 1020
        own = plan.splits_of(None).count
        assert part_bytes(plan) == (4 * 32 + own) * A_PART < 20e6
    assert 1024 * 32 * A_PART == 541_065_216


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[SharedPrefix]]:
    """Draw rows with nested shared prefixes, some beyond the reserved memory, and their contexts."""
    rows, shared = draw(st.integers(4, 300)), []
    ends = np.zeros(rows, np.int64)

    def level(members: list[int], depth: int) -> None:
        while len(members) >= 4 and depth < draw(st.integers(0, 12)):
            end = int(ends[members[0]]) + SEGMENT * draw(st.integers(1, 20))
            shared.append(SharedPrefix(members, end))
            ends[members] = end
            at, depth = draw(st.integers(1, len(members))), depth + 1
            level(members[at:], depth)
            members = members[:at]

    level(list(range(rows)), 0)
    longer = st.one_of(st.integers(1, 300), st.integers(1, 40_000))
    return [int(end) + draw(longer) for end in ends], shared


@settings(max_examples=examples(30, 120), deadline=None)
@given(trees(), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_no_step_takes_more_than_is_set_aside(tree, deterministic, captured, drafts, data) -> None:
    """With drafts, rows are tokens, up to eight per sequence; each token has its own parts."""
    contexts, shared = tree
    rows, queries, most = len(contexts), None, 1
    if drafts:
        queries, most = data.draw(st.lists(st.integers(1, 8), min_size=rows, max_size=rows)), 8
        # Shared keys are before all queries of a sequence
        contexts, rows, captured = [context + 8 for context in contexts], sum(queries), True
    longest = max(contexts)
    plan = planned(contexts, shared, longest if captured else None, deterministic, queries)
    shape = AttentionShape(**LLAMA_8B, deterministic=deterministic)
    alone = part_bytes(planned([longest] * rows, [], None, deterministic)) if deterministic else 0
    assert part_bytes(plan) <= alone + shape.spare_part_bytes(rows, longest, CPU, most)
    if plan.prefixes is not None:
        assert plan.prefixes.places[-1] <= plan.prefixes.parts


def test_little_memory_is_reserved() -> None:
    """1,024 rows of Llama 3.1 8B's shape on a GPU of 139 GiB, with any sharing and any length."""
    shape = AttentionShape(**LLAMA_8B)
    spare = (1024 + 66) + (4 * 1024 + 32 * 33)
    assert shape.spare_part_bytes(1024, 131_072, CPU) == spare * A_PART == 103_067_904


def test_levels_beyond_the_reserved_memory_are_read_by_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier levels are kept. Levels inside of a skipped level are skipped, too."""
    monkeypatch.setattr(part_room, "LEVELS", 2)
    everyone = list(range(8))
    shared = [
        SharedPrefix(everyone, 1024),
        SharedPrefix([0, 1, 2, 3], 2048),
        SharedPrefix([0, 1, 2], 3072),
        SharedPrefix([4, 5, 6, 7], 2048),
        SharedPrefix([4, 5], 3072),
    ]
    plan = planned([4000] * 8, shared, None)
    assert plan.starts.tolist() == [2048] * 8
    monkeypatch.setattr(part_room, "LEVELS", 1)
    assert planned([4000] * 8, shared, None).starts.tolist() == [1024] * 8
