"""Tests lists of work items: each key is read once, programs are balanced, and a graph's list has few
lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer_kernels.gpu import attention_launch, part_room
from batchinfer_kernels.gpu.attention_launch import LEAST_SEGMENT, PROGRAMS_PER_PROCESSOR, SEGMENT
from batchinfer_kernels.gpu.attention_splits import Splits, Splitter

DEVICE = torch.device("cpu")
PROCESSORS = 132  # an H100's
KV_HEADS = 8
HEADS, DIM = 32, 128
MOST = -(-PROGRAMS_PER_PROCESSOR * PROCESSORS // KV_HEADS)


@pytest.fixture(autouse=True)
def _a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_launch, part_room):
            patch.setattr(module, "processors", lambda _: PROCESSORS)
        yield


def split(contexts, starts=None, window=None, deterministic=False, longest=None) -> Splits:
    contexts = np.array(contexts, np.int64)
    starts = np.zeros_like(contexts) if starts is None else np.array(starts, np.int64)
    return Splitter(KV_HEADS, DEVICE, deterministic, longest).split(contexts, starts, window)


def passed_over(splits: Splits, contexts, starts) -> list[list[tuple[int, int]]]:
    """Return [first, end) of each row's parts in merge order, as the kernel reads the list."""
    found: dict[int, tuple[int, int]] = {}
    for row, offset, keys, place in splits.items.tolist():
        if row < 0:
            continue
        begin = starts[row]
        if splits.window is not None:
            begin += max(contexts[row] - splits.window - begin, 0) // splits.align * splits.align
        assert place not in found
        found[place] = (begin + offset, min(begin + offset + keys, contexts[row]))
    places = splits.places.tolist()
    return [[found[at] for at in range(*ends)] for ends in itertools.pairwise(places)]


def assert_every_key_once(splits: Splits, contexts, starts) -> None:
    for spans, context, start in zip(passed_over(splits, contexts, starts), contexts, starts, strict=True):
        at = start if splits.window is None else max(start, min(context, context - splits.window))
        assert not spans or spans[0][0] <= at
        assert all(first == end for (_, end), (first, _) in itertools.pairwise(spans))
        assert (spans[-1][1] if spans else start) == context


@st.composite
def steps(draw) -> tuple[list[int], list[int]]:
    """Draw contexts, few of them long, and the shared part of each."""
    lengths = st.one_of(st.integers(0, 900), st.integers(0, 40_000))
    contexts = draw(st.lists(lengths, min_size=1, max_size=40))
    return contexts, [draw(st.integers(0, c // SEGMENT)) * SEGMENT for c in contexts]


MODES = st.tuples(st.sampled_from((None, 1, 300, 4096)), st.booleans(), st.sampled_from((None, 65_536)))


@given(steps(), MODES)
def test_every_key_is_in_one_item(step, mode) -> None:
    contexts, starts = step
    window, deterministic, longest = mode
    splits = split(contexts, starts, window, deterministic, longest)
    assert_every_key_once(splits, contexts, starts)
    items = splits.items.tolist()
    assert splits.whole == (
        not any(row < 0 for row, *_ in items) and [i[0] for i in items] == [i[3] for i in items]
    )
    if splits.whole:
        assert sorted(i[0] for i in items) == list(range(len(contexts)))
    if not deterministic:
        assert splits.count <= len(contexts) + MOST
    if deterministic:
        ends = [first for spans in passed_over(splits, contexts, starts) for first, _ in spans]
        assert all(end % SEGMENT == 0 for end in ends), "split where every kernel splits"


@given(steps(), MODES, st.integers(1, 600))
def test_a_list_is_reused_until_it_is_rebuilt(step, mode, more) -> None:
    contexts, starts = step
    window, deterministic, longest = mode
    splitter = Splitter(KV_HEADS, DEVICE, deterministic, longest)
    before = np.array(contexts), np.array(starts)
    splits = splitter.split(*before, window)
    grown = before[0] + np.where(before[0] > 0, more, 0)  # padding rows stay as they are
    later = splitter.grown(splits, grown, before[1], splits.array.arrays.again())
    assert later.window == window
    assert_every_key_once(later, grown.tolist(), starts)
    if later.array.values is not splits.array.values:
        return
    if deterministic:
        fresh = splitter.split(grown, before[1], window)
        assert np.array_equal(splits.array.values, fresh.array.values), (
            "where a row is split may not depend on when"
        )
    else:
        assert more < LEAST_SEGMENT or window is not None or not grown.any()


def test_a_long_row_is_spread_over_the_gpu_for_any_bound() -> None:
    for longest in (None, 16_384, 131_072):
        (spans,) = passed_over(split([16_000], longest=longest), [16_000], [0])
        assert len(spans) * KV_HEADS >= 0.9 * PROGRAMS_PER_PROCESSOR * PROCESSORS
        sizes = [end - first for first, end in spans]
        assert max(sizes) - min(sizes) <= LEAST_SEGMENT
    contexts = [16_000] + [512] * 255
    spans = passed_over(split(contexts, longest=16_384), contexts, [0] * 256)
    assert len(spans[0]) >= 7
    assert {len(own) for own in spans[1:]} == {1}


def test_the_longest_items_are_first() -> None:
    """No long item starts when the others are done."""
    contexts = [100, 512, 9000, 300, 512, *[400] * 200]
    splits = split(contexts)
    lengths = [min(keys, contexts[row] - first) for row, first, keys, _ in splits.items.tolist()]
    assert lengths == sorted(lengths, reverse=True)


def test_lists_of_a_graph_have_few_lengths() -> None:
    """Lists have two lengths, without and with parts. With fixed splits, lengths are powers of two."""
    draw = np.random.default_rng(0)
    steps = [draw.integers(1, top, 256) for top in (300, 2000, 16_000, 60_000)]
    steps.append(np.array([60_000] + [300] * 255))
    assert {split(s, longest=65_536).count for s in steps} == {256, 256 + MOST}
    fixed = {split(s, deterministic=True, longest=131_072).count for s in steps}
    assert all(count & (count - 1) == 0 for count in fixed)
    few = {(split([n], longest=2000).count, split([n], longest=2000).whole) for n in range(1, 2000, 50)}
    assert len(few) == 1, "one row or a few have one graph"


def test_parts_need_memory_for_contexts_not_for_their_bound() -> None:
    splits = split([512] * 256, deterministic=True, longest=131_072)
    assert (splits.count, splits.whole) == (256, True)
    splits = split([512] * 255 + [16_384], deterministic=True, longest=131_072)
    assert (splits.count, splits.whole) == (512, False)
    assert split([131_072] * 3, deterministic=True, longest=131_072).count == 3 * 128, (
        "at most the possible number"
    )
