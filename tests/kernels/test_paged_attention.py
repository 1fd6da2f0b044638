"""Grouped attention equals the reference for odd shapes, random block tables and poisoned caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchinfer_kernels.cpu.paged_attention as paged
from batchinfer_kernels.cpu.paged_attention import SequenceShape, group_sequences, grouped_attention
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.examples import examples
from tests.kernels.cpu_kit import TOLERANCE
from tests.kernels.cpu_steps import Step, poisoned_step


def grouped(step: Step, window: int | None) -> torch.Tensor:
    return grouped_attention(step.q, step.k, step.v, step.groups(window), ScoreRules(0.3, window))


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
    step = poisoned_step(seed, kv_heads * share, kv_heads, dim, block_size, chunks)
    wanted = step.reference(window)
    step.leave_behind(window)
    assert torch.equal(step.reference(window), wanted)
    torch.testing.assert_close(grouped(step, window), wanted, **TOLERANCE[torch.float32])


def test_decodes_of_like_length_share_a_group():
    shapes = [SequenceShape(i, i, 1, 200 + i) for i in range(64)]
    assert len(group_sequences(shapes)) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_a_long_chunk_is_split_and_gives_the_same(monkeypatch, window):
    """Otherwise the masks of a long prompt would take gibibytes that the forecast does not count."""
    step = poisoned_step(3, 4, 2, 8, 4, [(33, 90), (1, 90), (1, 85), (7, 7), (64, 64)])
    monkeypatch.setattr(paged, "MAX_GROUP_PAIRS", 200)
    monkeypatch.setattr(paged, "MAX_GROUP_KEYS", 100)
    torch.testing.assert_close(grouped(step, window), step.reference(window), **TOLERANCE[torch.float32])
    groups = group_sequences([SequenceShape(i, 0, *c) for i, c in enumerate(step.chunks)])
    assert all(len(g) * max(s.queries for s in g) * max(s.context for s in g) <= 200 for g in groups)
    assert all(len(g) * max(s.context for s in g) <= 100 for g in groups)


def test_reference_refuses_heads_that_do_not_divide():
    q, cache = torch.zeros(1, 3, 8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention_reference(
            q, cache, cache, torch.zeros(1, 1, dtype=torch.int32), [1], [1], ScoreRules(1.0)
        )
