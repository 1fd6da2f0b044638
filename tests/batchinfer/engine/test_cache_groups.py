"""Tests which layers share block tables, and that layers with a window keep no blocks outside it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.kv.cache_layout import (
    MOST_TABLES,
    CacheLayout,
    cache_layout,
    one_group,
    stage_layout,
)
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.engine.load import rank_engine
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.models.spec.spec import CacheSpec
from tests.batchinfer.engine.small_engine import drain, folder, greedy
from tests.batchinfer.engine.test_engine import (
    MIXED,
)


def layout_of(windows: list[int | None], longest: int = 8192) -> CacheLayout:
    return cache_layout([CacheSpec(4, 64, w) for w in windows], 16, longest)


def shape(layout: CacheLayout) -> tuple[int, list[tuple[int | None, int]]]:
    """Return the number of layers per block, and per group the kept tokens and the number of layers."""
    return layout.depth, [(group.keeps, len(group.layers)) for group in layout.groups]


def test_equal_layers_share_a_block_table() -> None:
    assert shape(layout_of([None] * 32)) == (32, [(None, 32)])
    assert shape(layout_of([4096] * 32)) == (32, [(4096, 32)])


def test_layers_with_and_without_a_window_alternate_in_a_block() -> None:
    assert shape(layout_of([128, None] * 12)) == (12, [(128, 12), (None, 12)])
    assert layout_of([128, None] * 2).groups[0].layers == (0, 2)
    gemma3_12b = [1024, 1024, 1024, 1024, 1024, None] * 8
    assert shape(layout_of(gemma3_12b, 32_768)) == (8, [(1024, 8)] * 5 + [(None, 8)])
    gemma3_4b = [*[1024, 1024, 1024, 1024, 1024, None] * 5, *[1024] * 4]
    assert shape(layout_of(gemma3_4b, 32_768)) == (5, [(1024, 5)] * 5 + [(1024, 4), (None, 5)])


def test_a_window_longer_than_all_rows_is_ignored() -> None:
    """If no row exceeds the window, the job runs as if the model had none, with one block table."""
    layout = layout_of([4096, None] * 13, longest=4096)
    assert shape(layout) == (26, [(None, 26)])
    assert layout.groups[0].windows == {4096, None}


def test_layers_with_different_shapes_keep_all_tokens() -> None:
    caches = [CacheSpec(4, 64, 128), CacheSpec(2, 64, None)]
    assert shape(cache_layout(caches, 16, 8192)) == (2, [(None, 2)])


@given(
    st.lists(st.sampled_from([None, 64, 1024]), min_size=1, max_size=70),
    st.integers(1, 20_000),
    st.sampled_from([1, 16, 100]),
)
def test_each_layer_is_in_one_group_and_groups_need_no_more_memory(windows, longest, size) -> None:
    layout = cache_layout([CacheSpec(1, 8, w) for w in windows], size, longest)
    assert sorted(i for group in layout.groups for i in group.layers) == list(range(len(windows)))
    assert all(1 <= len(group.layers) <= layout.depth for group in layout.groups)
    assert len(layout.groups) <= MOST_TABLES
    for group in layout.groups:
        assert group.windows == {windows[i] for i in group.layers}
        assert group.keeps is None or group.windows == {group.keeps}
    without = one_group([CacheSpec(1, 8, w) for w in windows], size)
    blocks = layout.sizes.among_others(longest), without.sizes.among_others(longest)
    assert blocks[0] * layout.depth <= blocks[1] * without.depth * 1.02


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 300), st.sampled_from([1, 2, 5, 16]))
def test_sizes_follow_from_the_visible_tokens(window, chunk, start, size) -> None:
    sizes = TableSizes(size, (window,))
    seen = range(max(0, start - window + 1), start + chunk)
    blocks = {at // size for at in seen}
    assert sizes.unseen(window, start) == min(blocks)
    assert len(blocks) <= sizes.span(window, chunk)
    assert len(blocks) <= sizes.alone(start + chunk, chunk)
    assert len(blocks) <= sizes.among_others(start + chunk) + chunk // size
    widest = max(len({at // size for at in range(at, at + window + chunk - 1)}) for at in range(size))
    assert widest == sizes.span(window, chunk)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 120), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(1, 3),
    st.sampled_from([1, 2, 5, 16]),
)
def test_no_step_holds_more_than_is_set_aside(rows, window, tables, size) -> None:
    """`rows` are (length, chunk, is the chunk part of the step before, which may be undone). Each of the two
    steps runs at most the budget of tokens."""
    sizes = TableSizes(size, (window,) * tables)
    steps = (
        [min(length, chunk) for length, chunk, before in rows if before is step] for step in (False, True)
    )
    budget = max(map(sum, steps))
    held = sum(tables * min(sizes.blocks(n), sizes.span(window, min(n, chunk))) for n, chunk, _ in rows)
    assert held <= sum(sizes.among_others(n) for n, _, _ in rows) + sizes.for_chunks(budget)


def test_reserved_blocks_are_used_up() -> None:
    """Long chunks of two steps use nearly all of the reserved blocks."""
    sizes, budget = TableSizes(16, (8, None, 8)), 16 * 100
    held = 2 * 2 * sizes.span(8, budget)
    spare = 2 * 2 * (sizes.span(8) + 1) + sizes.for_chunks(budget) - held
    assert 0 <= spare <= 2 * 2 * 2
    job = JobSize(longest=10_000, max_num_seqs=4, max_num_batched_tokens=budget)
    blocks = cache_blocks(1, sizes, job, None, 10**9, "cpu")
    assert blocks > 4 * sizes.among_others(10_000) + sizes.for_chunks(budget)


LONG = [[(7 * i + j) % 250 for j in range(250)] for i in range(12)]


def loaded(memory: int | None = None, budget: int = 32) -> LoadedModel:
    config = EngineConfig(
        LoadConfig(
            folder("qwen2", **{**MIXED, "layer_types": tuple(MIXED["layer_types"])}),
            "float32",
            "cpu",
            threads=1,
        ),
        max_model_len=400,
        longest=300,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        block_size=8,
        kv_memory=memory,
    )
    return load_model(config)


def without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(caches: list[CacheSpec], block_size: int, longest: int) -> CacheLayout:
        return one_group(caches, block_size)

    monkeypatch.setattr(rank_engine, "cache_layout", layout)


def test_blocks_that_a_window_has_left_are_free_again() -> None:
    made = loaded()
    layout = made.runner.layout
    assert shape(layout) == (2, [(24, 2), (24, 2), (24, 1), (None, 2)])
    ran = drain(made.engine(), greedy(LONG[:1], 50, ignore_eos=True))
    decodes = [step for step in ran.steps if step.decode_tokens]
    assert len(decodes) == 49
    for step, tokens in zip(decodes[:-1], range(251, 299), strict=True):  # with the last one it has ended
        seen = {at // 8 for at in range(tokens - 24, tokens)}
        assert step.blocks_used == 3 * len(seen) + -(-tokens // 8)
    # The window's part for the largest chunk is added to that for the whole context.
    assert max(s.blocks_used for s in ran.steps) <= layout.sizes.alone(300, 32) == 38 + 3 * 8


def test_a_window_needs_less_memory_and_the_same_memory_holds_more_rows(monkeypatch) -> None:
    """Rows have 300 tokens. 5 of 7 layers have a window of 24; 2 of 7 layers keep all tokens."""
    windows = loaded()
    least = windows.runner.layout.sizes.alone(300, 32) * windows.info.kv_bytes // windows.info.blocks
    memory = 3 * least
    held = drain(loaded(memory).engine(), greedy(LONG, 20, ignore_eos=True))
    without_windows(monkeypatch)
    whole = loaded()
    assert windows.info.kv_bytes < 0.6 * whole.info.kv_bytes
    wanted = drain(loaded(memory).engine(), greedy(LONG, 20, ignore_eos=True))
    assert held.answers == wanted.answers
    assert max(s.running for s in held.steps) >= 2 * max(s.running for s in wanted.steps)
    assert sum(s.preemptions for s in held.steps) == 0


@given(
    st.lists(st.sampled_from([None, 16, 64]), min_size=2, max_size=14),
    st.integers(1, 13),
    st.sampled_from([100, 20]),
)
def test_stages_have_the_tables_of_the_whole(windows: list[int | None], border: int, longest: int) -> None:
    """Each layer is in a group of its kind, and a stage's blocks have no unused layers."""
    caches = [CacheSpec(2, 8, window=window) for window in windows]
    layout = cache_layout(caches, 16, longest)
    kind_of = {layer: group.keeps for group in layout.groups for layer in group.layers}
    border = min(border, len(caches) - 1)
    for first, end in ((0, border), (border, len(caches))):
        stage = stage_layout(layout, caches, (first, end))
        assert [group.keeps for group in stage.groups] == [group.keeps for group in layout.groups]
        assert stage.sizes == layout.sizes
        placed = [first + layer for group in stage.groups for layer in group.layers]
        assert sorted(placed) == [*range(first, end)]
        for group in stage.groups:
            assert {kind_of[first + layer] for layer in group.layers} <= {group.keeps}
            if group.layers:
                assert group.windows == {windows[first + layer] for layer in group.layers}
        tables, held = (
            Counter(group.keeps for group in stage.groups),
            Counter(map(kind_of.get, range(first, end))),
        )
        assert stage.depth == max(-(-held[kind] // tables[kind]) for kind in tables)
