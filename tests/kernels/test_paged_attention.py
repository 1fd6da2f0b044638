"""Grouped attention equals the reference over odd shapes, random block tables and poisoned caches."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchinfer_kernels.cpu.paged_attention as paged
from batchinfer_kernels.cpu.paged_attention import (
    SequenceShape,
    build_group,
    group_sequences,
    grouped_attention,
)
from batchinfer_kernels.paged_attention import paged_attention_reference
from tests.examples import examples


def poisoned_case(
    seed: int, heads: int, kv_heads: int, dim: int, block_size: int, chunks: list[tuple[int, int]]
):
    """Random q and a cache whose unused slots are NaN; `chunks` are (queries, context)."""
    torch.manual_seed(seed)
    tables = [-(-context // block_size) for _, context in chunks]
    total = sum(tables) + 3
    caches = [torch.full((total, kv_heads, block_size, dim), float("nan")) for _ in range(2)]
    free = list(range(total))
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(chunks), max(tables), dtype=torch.int32)
    for row, (_, context) in enumerate(chunks):
        for i in range(tables[row]):
            table[row, i] = block = free.pop()
            for cache in caches:
                cache[block, :, : min(block_size, context - i * block_size)] = torch.randn(
                    kv_heads, min(block_size, context - i * block_size), dim
                )
    q = torch.randn(sum(n for n, _ in chunks), heads, dim)
    return q, caches, table


def leave_behind(caches, table, chunks: list[tuple[int, int]], window: int | None) -> None:
    """Poisons the blocks that the window of each chunk's first query has left, and names another one in the tables."""
    for row, (queries, context) in enumerate(chunks):
        seen = 0 if window is None else max(0, context - queries - window + 1)
        left = table[row, : seen // caches[0].shape[2]]
        for cache in caches:
            cache[left.long()] = float("nan")
        left[:] = table[row, 0]


def grouped(q, caches, table, chunks, block_size, scale, window):
    shapes, start = [], 0
    for row, (queries, context) in enumerate(chunks):
        shapes.append(SequenceShape(row, start, queries, context))
        start += queries
    groups = [build_group(g, table, block_size, frozenset({window})) for g in group_sequences(shapes)]
    return grouped_attention(q, *caches, groups, scale, window)


@given(
    seed=st.integers(0, 2**16),
    kv_heads=st.sampled_from([1, 2, 3]),
    share=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([8, 20, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 40]),
    lengths=st.lists(st.tuples(st.integers(1, 33), st.integers(0, 100)), min_size=1, max_size=9),
)
@settings(max_examples=examples(20, 60), deadline=None)
def test_grouped_equals_reference(seed, kv_heads, share, dim, block_size, window, lengths):
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, caches, table = poisoned_case(seed, kv_heads * share, kv_heads, dim, block_size, chunks)
    lens = [n for n, _ in chunks], [c for _, c in chunks]
    wanted = paged_attention_reference(q, *caches, table, *lens, 0.3, window)
    leave_behind(caches, table, chunks, window)
    assert torch.equal(paged_attention_reference(q, *caches, table, *lens, 0.3, window), wanted)
    got = grouped(q, caches, table, chunks, block_size, 0.3, window)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_decodes_of_like_length_share_a_group():
    shapes = [SequenceShape(i, i, 1, 200 + i) for i in range(64)]
    assert len(group_sequences(shapes)) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_a_long_chunk_is_cut_and_gives_the_same(monkeypatch, window):
    """Else the masks of one long prompt take gibibytes that nobody counted."""
    chunks = [(33, 90), (1, 90), (1, 85), (7, 7), (64, 64)]
    q, caches, table = poisoned_case(3, 4, 2, 8, 4, chunks)
    wanted = paged_attention_reference(
        q, *caches, table, [n for n, _ in chunks], [c for _, c in chunks], 0.3, window
    )
    monkeypatch.setattr(paged, "MAX_GROUP_PAIRS", 200)
    monkeypatch.setattr(paged, "MAX_GROUP_KEYS", 100)
    got = grouped(q, caches, table, chunks, 4, 0.3, window)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    groups = group_sequences([SequenceShape(i, 0, *c) for i, c in enumerate(chunks)])
    assert all(len(g) * max(s.queries for s in g) * max(s.context for s in g) <= 200 for g in groups)
    assert all(len(g) * max(s.context for s in g) <= 100 for g in groups)


def test_reference_refuses_heads_that_do_not_divide():
    q, cache = torch.zeros(1, 3, 8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention_reference(q, cache, cache, torch.zeros(1, 1, dtype=torch.int32), [1], [1], 1.0)
