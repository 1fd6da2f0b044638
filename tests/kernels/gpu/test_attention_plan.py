"""Tests plans of attention: the programs of each step, their order, and plans that do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer_kernels.gpu import attention_launch, attention_plan
from batchinfer_kernels.gpu.attention_plan import (
    AttentionShape,
    Room,
    SharedPrefix,
    find_shared,
    plan_attention,
)
from batchinfer_kernels.step_tables import StepTables
from tests.kernels.refused import assert_refused

SHAPE = AttentionShape(torch.bfloat16, 8, 2, 64)  # 128 rows of 4 heads: 32 queries an item; tiles of 64 keys


def plan(query_lens, context_lens, shared=(), room=None, shape=SHAPE):
    return plan_attention(query_lens, context_lens, shape, "cpu", shared, room)


@pytest.mark.parametrize("arch", ["", "80", "86", "89", "90", "100", "120", "gfx942"])
@pytest.mark.parametrize("work", ["prefill", "prefix", "deterministic"])
def test_tiles_of_quantised_caches_have_the_rows_of_the_plan(monkeypatch, arch: str, work) -> None:
    """A plan does not know the cache's dtype: queries beyond a kernel's rows would be skipped."""
    monkeypatch.setattr(attention_launch, "architecture", lambda: arch)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 128, 256):
            plain, coded = (attention_launch.choose_tiles(work, dtype, dim, c) for c in (False, True))
            assert coded.rows == plain.rows, (dtype, dim)


def test_a_step_of_single_queries_needs_no_rows() -> None:
    found = plan([1, 1, 1], [5, 0, 9])
    assert (found.items, found.rows, found.prefixes) == (None, None, None)
    assert (found.singles, found.lengths.tolist(), found.starts.tolist()) == (3, [5, 0, 9], [0, 0, 0])
    assert found.contexts.tolist() == [5, 0, 9]
    assert found.contexts.dtype == torch.int32


def test_chunks_and_single_queries_go_different_ways() -> None:
    found = plan([3, 1, 0, 40, 1], [3, 50, 7, 90, 1])
    assert found.items is not None
    assert found.items.tolist() == [[3, 36, 8, 82, 90], [3, 4, 32, 50, 82], [0, 0, 3, 0, 3]]
    assert found.rows is not None
    assert found.rows.tolist() == [[3, 1], [44, 4]]
    assert (found.singles, found.lengths.tolist()) == (2, [50, 1])


def test_levels_are_split_into_items_of_rows_and_keys(monkeypatch) -> None:
    monkeypatch.setattr(attention_plan, "prefix_segment", lambda *_: 256)
    members = list(range(40))
    found = plan([1] * 41, [700] * 41, [SharedPrefix(members, 300), SharedPrefix([5, 39], 650)]).prefixes
    assert found is not None
    columns = ("first", "members", "sequence", "begin", "end", "part")
    items = [dict(zip(columns, item, strict=True)) for item in found.items.tolist()]
    seen = np.zeros((41, 700), int)
    for item in items:
        rows = found.members[item["first"] : item["first"] + item["members"]]
        seen[rows, item["begin"] : item["end"]] += 1
    wanted = np.zeros((41, 700), int)
    wanted[:40, :256] = 1
    wanted[[5, 39], :640] = 1
    assert (seen == wanted).all()
    assert found.starts.tolist() == seen.sum(1).tolist()
    assert {i["members"] for i in items} == {32, 8, 2}
    assert sorted((i["begin"], i["part"]) for i in items if i["members"] == 2) == [(256, 1), (512, 2)]
    assert [i["end"] - i["begin"] for i in items] == [256, 256, 256, 128]
    counts = found.places.diff()
    assert (found.parts, counts[5], counts[0], counts[40]) == (38 + 2 * 3, 3, 1, 0)


def test_own_keys_are_the_unshared_ones() -> None:
    found = plan([1] * 5, [700] * 5, [SharedPrefix([0, 1, 2, 3], 300)])
    assert found.splits_of(None).keys.tolist() == [444] * 4 + [700]


def test_less_than_a_tile_or_one_query_is_not_shared() -> None:
    assert plan([1, 1], [70, 70], [SharedPrefix([0, 1], 63)]).prefixes is None
    assert plan([1, 3], [700, 700], [SharedPrefix([0, 1], 640)]).prefixes is None


def test_deterministic_levels_end_with_segments() -> None:
    shape = AttentionShape(torch.bfloat16, 8, 2, 64, deterministic=True)
    found = plan([1, 1], [3000, 3000], [SharedPrefix([0, 1], 2900)], shape=shape).prefixes
    assert found is not None
    assert sorted(i[3:] for i in found.items.tolist()) == [[0, 1024, 0], [1024, 2048, 1]]


def test_prefixes_that_do_not_nest_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same outer prefix"):
        plan([1] * 3, [700] * 3, [SharedPrefix([0, 1], 128), SharedPrefix([1, 2], 256)])
    assert_refused("do not all have 256 keys", plan, [1, 1], [700, 255], [SharedPrefix([0, 1], 256)])
    assert_refused("distinct", plan, [1, 1], [700, 700], [SharedPrefix([0, 0], 256)])


def test_steps_that_exceed_the_reserved_memory_are_refused() -> None:
    shared = [SharedPrefix([0, 1], 256)]
    assert_refused("chunks of up to 2", plan, [1, 2], [9, 9], room=Room(100))
    assert_refused("contexts of up to 101", plan, [1, 1], [9, 101], room=Room(100))
    assert_refused("do not fit Room", plan, [1, 1], [300, 300], shared, room=Room(300, sharing=(1, 1, 1)))
    assert_refused("do not fit Room", plan, [1, 1], [300, 300], shared, room=Room(300))


def test_only_a_plan_of_the_same_sizes_is_refilled() -> None:
    found = plan([1, 1], [9, 5], room=Room(20))
    later = found.refilled(plan([1, 1], [10, 20], room=Room(20)))
    assert later.contexts is found.contexts
    assert (found.contexts.tolist(), later.lengths.tolist()) == ([10, 20], [10, 20])
    for other in (plan([1, 1], [9, 9]), plan([1] * 3, [9] * 3, room=Room(20)), plan([1, 3], [9, 9])):
        assert_refused("cannot run", found.refilled, other)


def test_a_plan_serves_longer_contexts_only_if_it_serves_all_on_the_way() -> None:
    """In this window a row with fixed segments sees three segments at one position, and two before and after
    it."""
    shape = replace(SHAPE, deterministic=True)
    found = plan_attention([1], [2048], shape, "cpu", room=Room(4096), windows=[1026])
    assert [found.serves([context]) for context in (2048, 2049, 2050, 2051)] == [True, False, False, False]
    found = plan_attention([1], [2050], shape, "cpu", room=Room(4096), windows=[1026])
    assert found.serves([2053])
    assert not found.serves([4097])


def tables_of(*rows) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


def test_shared_blocks_are_found_level_by_level() -> None:
    """Blocks of 128: all rows share 2, four of them 4; the query's own block is never shared."""
    inner = [[1, 2, 3, 4, 10 + i] for i in range(4)]
    outer = [[1, 2, 20 + i, 30 + i, 40 + i] for i in range(4)]
    tables = tables_of(*inner, *outer, [1, 2, 3, 4, 5])
    found = find_shared([1] * 8 + [2], [600] * 9, StepTables.of(tables), 128, 64)
    assert [(sorted(p.sequences), p.keys) for p in found] == [(list(range(8)), 256), ([0, 1, 2, 3], 512)]
    assert plan([1] * 8 + [2], [600] * 9, found).prefixes is not None
    whole = find_shared([1] * 8 + [2], [600] * 9, StepTables.of(tables), 128, 512)
    assert [(sorted(p.sequences), p.keys) for p in whole] == [([0, 1, 2, 3], 512)], "no part of a unit"
    short = find_shared([1] * 8, [256] * 8, StepTables.of(tables[:8]), 128, 64)
    assert short == [], "all of block 2 but its last key is before the query"


def test_short_shared_prefixes_are_ignored() -> None:
    same = tables_of(*[[1, 2, 10 + i] for i in range(9)])
    assert find_shared([1] * 9, [50] * 9, StepTables.of(same), 16, 64) == []
    few = tables_of(*[[1, 2, 10 + i] for i in range(3)])
    assert find_shared([1] * 3, [600] * 3, StepTables.of(few), 256, 64) == []
    apart = tables_of(*[[i, 9, 9] for i in range(8)])
    assert find_shared([1] * 8, [600] * 8, StepTables.of(apart), 256, 64) == []
    assert find_shared([], [], StepTables.of(np.zeros((0, 3), np.int32)), 256, 64) == []
