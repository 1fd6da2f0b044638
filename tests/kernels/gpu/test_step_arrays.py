"""Tests that a step's host arrays are copied to the device together, by counting copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer_kernels.gpu import step_arrays
from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.step_arrays import StepArrays

DEVICE = torch.device("cpu")
SHAPE = AttentionShape(torch.float16, 8, 2, 64)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the length of each copy to the device."""
    found: list[int] = []
    staged = step_arrays.copy_to_pinned
    monkeypatch.setattr(
        step_arrays,
        "copy_to_pinned",
        lambda values, device: found.append(values.size) or staged(values, device),
    )
    return found


ARRAYS = st.lists(st.lists(st.integers(-5, 10**6), max_size=9), min_size=1, max_size=6)


@given(ARRAYS, st.data())
def test_tensors_hold_what_was_added_last_and_begin_at_16_bytes(lists, data) -> None:
    arrays = StepArrays(DEVICE)
    held = [arrays.add(np.array(one, np.int64)) for one in lists]
    assert [one.tensor.tolist() for one in held] == lists
    base = held[0].tensor.untyped_storage().data_ptr()
    assert all((one.tensor.data_ptr() - base) % 16 == 0 for one in held if len(one.values))
    later = arrays.again()
    changed = data.draw(st.sets(st.integers(0, len(lists) - 1)))
    wanted = [[value + 1 for value in one] if n in changed else one for n, one in enumerate(lists)]
    for n in changed:
        later.put(n, np.array(wanted[n]))
    before = [one.tensor for one in held]
    arrays.refill(later)
    assert [one.tensor.tolist() for one in held] == wanted == [one.values.tolist() for one in held]
    assert all(one.tensor is was for one, was in zip(held, before, strict=True)), (
        "a graph reads them in place"
    )
    assert [one.of(later).tensor.tolist() for one in held] == wanted


def test_all_differences_are_copied_together(copied) -> None:
    arrays = StepArrays(DEVICE)
    first, second, third = (arrays.add(np.full(n, n)) for n in (3, 8, 5))
    assert copied == []
    assert [one.tensor.tolist() for one in (second, third)] == [[8] * 8, [5] * 5]
    assert copied == [4 + 8 + 8], "with what aligns them"
    fourth = arrays.add(np.ones(2))
    assert fourth.tensor.tolist() == [1, 1]
    assert copied[1:] == [4], "later arrays are copied separately"
    arrays.refill(arrays.again())
    later = arrays.again()
    later.put(second.number, np.zeros(8))
    later.put(fourth.number, np.full(2, 7))
    arrays.refill(later)
    assert copied[2:] == [8, 4], "nothing where nothing differs"
    assert [one.tensor.tolist() for one in (first, second, fourth)] == [[3] * 3, [0] * 8, [7, 7]]
    with pytest.raises(ValueError, match="do not match"):
        arrays.refill(StepArrays(DEVICE, arrays.values[:1]))


def test_a_step_is_one_copy(copied) -> None:
    """Prompts next to decoding rows that share keys, in layers of two windows."""
    shared = [SharedPrefix([1, 2, 3, 4], 512)]
    plan = plan_attention([40, 1, 1, 1, 1], [90, 700, 700, 900, 520], SHAPE, "cpu", shared, None, {None, 64})
    plan = plan.with_windows({None, 64, 100})
    assert copied == []
    for tensor in (plan.items, plan.rows, plan.contexts, *(plan.splits_of(w).items for w in (None, 64, 100))):
        assert tensor is not None
    assert plan.prefixes is not None
    assert plan.prefixes.starts.tolist() == [512] * 4
    assert len(copied) == 1


def test_a_replayed_step_is_one_copy_for_all_its_plans(copied) -> None:
    """Only contexts are copied while the splits fit; all arrays are copied after a new plan."""
    contexts = [300, 20, 5, 0]
    room = Room(longest=2048)
    first = plan_attention([1] * 4, contexts, SHAPE, "cpu", (), room, {None})
    graph = [first, first.with_windows({64})]
    graph[0].place()
    assert len(copied) == 1
    for step in range(1, 4):
        grown = [context + step if context else 0 for context in contexts]
        later = [graph[0].grown(grown)]
        later.append(graph[1].grown(grown, later[0]))
        graph = [old.refilled(new) for old, new in zip(graph, later, strict=True)]
        assert [plan.contexts.tolist() for plan in graph] == [grown] * 2
    assert copied[1:] == [4] * 3
    other = plan_attention([1] * 4, [700, 9, 0, 0], SHAPE, "cpu", (), room, {None})
    again = [other, other.with_windows({64})]
    graph = [old.refilled(new) for old, new in zip(graph, again, strict=True)]
    assert len(copied) == 5
    for plan, fresh, window in zip(graph, again, (None, 64), strict=True):
        assert plan.splits_of(window).items.tolist() == fresh.splits_of(window).items.tolist()
    assert graph[0].contexts.data_ptr() == first.contexts.data_ptr()


def test_new_splits_are_at_the_addresses_that_the_graph_reads(copied) -> None:
    shape = AttentionShape(torch.float16, 8, 2, 64, deterministic=True)
    graph = plan_attention([1] * 4, [3000, 20, 5, 0], shape, "cpu", (), Room(longest=8192), {None})
    items = graph.splits_of(None).items
    later = graph.grown([3100, 120, 105, 0])
    fresh = plan_attention([1] * 4, [3100, 120, 105, 0], shape, "cpu", (), Room(longest=8192), {None})
    later = graph.refilled(later)
    assert len(copied) == 2
    assert items.tolist() == fresh.splits_of(None).items.tolist()
    assert later.splits_of(None).items.data_ptr() == items.data_ptr()
