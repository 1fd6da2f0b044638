"""Tests attention of draft trees against the reference, in graphs and with prompts. Other rows keep their
bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu import decode_attention
from batchinfer_kernels.gpu.attention_plan import Room, plan_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import ScoreRules
from tests.examples import first_of
from tests.kernels.gpu.attention_cases import (
    SCALE,
    Case,
    assert_near,
    attend_few,
    attend_sharing,
    check,
    paged_case,
    sharing,
    tree_of,
)
from tests.kernels.refused import assert_refused

# (queries, context) → nodes of the tree: near ends of blocks and tiles, at the start of the text, after a
# long text, chunks without a tree
FEW = {(8, 33): 7, (5, 5): 4, (1, 16): 0, (0, 9): 0, (7, 68): 6, (4, 66): 2, (8, 300): 7, (3, 17): 0}
PADDING = [(1, 0), (1, 0), (0, 0)]
# A tree of maximum size, chunks of prompts, and a tree of a single node, the rest of a split tree
MIXED = {(34, 110): 32, (40, 70): 0, (8, 200): 7, (1, 30): 0, (3, 129): 2, (20, 20): 5, (2, 2): 1}
CONTEXTS = (300, 420, 321, 513, 400, 200, 260)
SHARING = {(1 + at % 4, context): at % 4 for at, context in enumerate(CONTEXTS)}
PREFIXES = [([0, 1, 2, 3, 4], 128), ([1, 2, 3, 4], 192), ([3, 4], 384)]
WAYS: dict[str, tuple[Any, dict[tuple[int, int], int]]] = {
    "few": (attend_few, FEW),
    "few, fixed": (partial(attend_few, deterministic=True), FEW),
    "few sharing": (partial(attend_few, prefixes=PREFIXES, queries=4), SHARING),
    "mixed": (attend_sharing, MIXED),
    "mixed, fixed": (partial(attend_sharing, deterministic=True), MIXED),
}
KINDS = [
    (torch.float32, None),
    (torch.bfloat16, torch.int8),
    (torch.float16, None),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]


def case_of(way: str, **options: Any) -> tuple[Case, TreeMask]:
    """Return a case and the mask of its trees. Graphs have padding rows after their steps."""
    chunks = WAYS[way][1]
    case = paged_case([*chunks, *(PADDING if way.startswith("few,") or way == "few" else [])], **options)
    if "sharing" in way:
        case = sharing(case, 16, PREFIXES)
    known = replace(case, chunks=[*chunks])
    return case, tree_of(known, *chunks.values())


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), first_of(KINDS, 3))
def test_nodes_see_the_text_and_their_ancestors(way: str, dtype: Any, cache_dtype: Any, device: str) -> None:
    case, tree = case_of(way, dtype=dtype, cache_dtype=cache_dtype, device=device)
    check(case, WAYS[way][0], tree=tree)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["few", "mixed"])
def test_soft_caps_sinks_and_odd_sizes(way: str, device: str) -> None:
    case, tree = case_of(way, kv_heads=1, group=5, dim=72, dtype=torch.float16, device=device)
    check(case, WAYS[way][0], soft_cap=1.5, sinks=torch.linspace(-1, 2, 5, device=device), tree=tree)


def test_a_sequence_may_have_more_rows_than_a_program(monkeypatch, device: str) -> None:
    """8 queries of 12 heads, for programs of up to 64 rows: a tree is divided, perhaps with other tiles."""
    of_trees, chosen = [], decode_attention.kernel_arguments
    monkeypatch.setattr(
        decode_attention, "kernel_arguments", lambda *given: of_trees.append(given[-1]) or chosen(*given)
    )
    case, tree = case_of(
        "few", kv_heads=1, group=12, dtype=torch.float16, cache_dtype=torch.int8, device=device
    )
    check(case, WAYS["few"][0], tree=tree)
    assert set(of_trees) == {True}
    WAYS["few"][0](case)
    assert of_trees[-1] is False


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_sequences_without_trees_keep_their_bits(way: str, device: str) -> None:
    """They are next to sequences with trees: a chain, one token, a prompt."""
    case, tree = case_of(way, device=device)
    attend, nodes = WAYS[way][0], [*WAYS[way][1].values()]
    of_trees, plain = attend(case, tree=tree)[0], attend(case)[0]
    alone = torch.tensor(
        [not count for count, queries in zip(nodes, case.queries, strict=False) for _ in range(queries)]
    )
    known = slice(0, len(alone))
    assert torch.equal(of_trees[known][alone], plain[known][alone])
    assert not torch.equal(of_trees[known][~alone], plain[known][~alone])


@pytest.mark.sample(2)
@pytest.mark.parametrize("border", [33, 36, 79, 81, 105])
def test_a_tree_may_be_run_in_parts(border: int, device: str) -> None:
    """As in micro-batches, which may have a single node."""
    case, tree = case_of("mixed", device=device)
    wanted, done, begun = case.reference(tree=tree)[0], 0, 0
    for first, end in ((0, border), (border, len(case.q))):
        chunks, rows, at = [], [], 0
        for row, (queries, context) in enumerate(case.chunks):
            low, high = max(first, at), min(end, at + queries)
            at += queries
            if low < high:
                chunks.append((high - low, context - at + high))
                rows.append(row)
        part = replace(case, q=case.q[first:end], table=case.table[rows], chunks=chunks)
        mask = tree.part(first, end)
        assert_near(attend_sharing(part, tree=mask)[0], wanted[first:end], torch.float32)
        done, begun = done + (mask is not None), begun + 1
    assert (done, begun) == (2, 2)


def test_a_graph_of_trees_is_refilled(device: str) -> None:
    """With a step that has other trees at other positions and more padding, but not with a step without
    trees."""
    case, tree = case_of("few", device=device)
    room = Room(longest=600, queries=8)
    plan = plan_attention(case.queries, case.contexts, case.shape, device, (), room, tree=tree)
    chunks = {(2, 90): 1, (8, 310): 7, (1, 20): 0, (8, 31): 0, (6, 6): 5, (8, 64): 3}
    other = paged_case([*chunks, *[(1, 0)] * 5], device=device)
    trees = tree_of(replace(other, chunks=[*chunks]), *chunks.values())
    lens = (other.queries, other.contexts)
    later = plan.refilled(plan_attention(*lens, case.shape, device, (), room, tree=trees))
    wanted = other.reference(tree=trees)[0]
    assert_near(paged_attention(*other.tensors, later, ScoreRules(SCALE)), wanted, torch.float32)
    assert_refused("cannot run", plan.refilled, plan_attention(*lens, case.shape, device, (), room))


def test_unsupported_options_of_trees_are_refused(device: str) -> None:
    case, tree = case_of("mixed", device=device)
    nearby = torch.from_numpy(tree.nearby).to(device)
    for wrong in (nearby.long(), nearby[1:]):
        with pytest.raises(ValueError, match="nearby is"):
            prefill_attention(*case.tensors, case.queries, case.contexts, ScoreRules(SCALE), nearby=wrong)
    with pytest.raises(ValueError, match="without a window"):
        prefill_attention(*case.tensors, case.queries, case.contexts, ScoreRules(SCALE, 40), nearby=nearby)
    case, tree = case_of("few", device=device)
    assert_refused("excludes a window", attend_few, case, tree=tree, window=40)
