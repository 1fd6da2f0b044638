"""Plans: who passes over what, in which order, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.gpu import attention_launch, attention_plan
from batchinfer_kernels.gpu.attention_plan import (
    AttentionShape,
    Room,
    SharedPrefix,
    find_shared,
    plan_attention,
)
from batchinfer_kernels.step_tables import StepTables
from tests.examples import examples

SHAPE = AttentionShape(torch.bfloat16, 8, 2, 64)  # 128 rows of 4 heads: 32 queries an item; tiles of 64 keys


def plan(query_lens, context_lens, shared=(), room=None, shape=SHAPE):
    return plan_attention(query_lens, context_lens, shape, "cpu", shared, room)


@pytest.mark.parametrize("arch", ["", "80", "86", "89", "90", "100", "120", "gfx942"])
@pytest.mark.parametrize("work", ["prefill", "prefix", "deterministic"])
def test_tiles_of_codes_have_the_rows_that_a_plan_counts_on(monkeypatch, arch: str, work) -> None:
    """A plan does not know of codes: queries beyond a kernel's rows would be left out."""
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
    assert found.items.tolist() == [[3, 36, 8, 82], [3, 4, 32, 50], [0, 0, 3, 0]]
    assert found.rows is not None
    assert found.rows.tolist() == [[3, 1], [44, 4]]
    assert (found.singles, found.lengths.tolist()) == (2, [50, 1])


def test_levels_are_cut_into_items_of_rows_and_keys(monkeypatch) -> None:
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


def test_own_keys_are_what_is_not_shared() -> None:
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


def test_what_does_not_nest_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole level"):
        plan([1] * 3, [700] * 3, [SharedPrefix([0, 1], 128), SharedPrefix([1, 2], 256)])
    with pytest.raises(ValueError, match="do not all have 256 keys"):
        plan([1, 1], [700, 255], [SharedPrefix([0, 1], 256)])
    with pytest.raises(ValueError, match="distinct"):
        plan([1, 1], [700, 700], [SharedPrefix([0, 0], 256)])


def test_what_does_not_fit_into_a_room_is_refused() -> None:
    shared = [SharedPrefix([0, 1], 256)]
    with pytest.raises(ValueError, match="chunks of up to 2"):
        plan([1, 2], [9, 9], room=Room(100))
    with pytest.raises(ValueError, match="contexts of up to 101"):
        plan([1, 1], [9, 101], room=Room(100))
    with pytest.raises(ValueError, match="are not in Room"):
        plan([1, 1], [300, 300], shared, room=Room(300, sharing=(1, 1, 1)))
    with pytest.raises(ValueError, match="are not in Room"):
        plan([1, 1], [300, 300], shared, room=Room(300))


def test_only_a_plan_of_the_same_sizes_is_refilled() -> None:
    found = plan([1, 1], [9, 5], room=Room(20))
    later = found.refilled(plan([1, 1], [10, 20], room=Room(20)))
    assert later.contexts is found.contexts
    assert (found.contexts.tolist(), later.lengths.tolist()) == ([10, 20], [10, 20])
    for other in (plan([1, 1], [9, 9]), plan([1] * 3, [9] * 3, room=Room(20)), plan([1, 3], [9, 9])):
        with pytest.raises(ValueError, match="does not run"):
            found.refilled(other)


def tables_of(*rows) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


def test_shared_blocks_are_found_level_by_level() -> None:
    """Blocks of 128: all share 2, four of them 4; the query's own block is never shared."""
    inner = [[1, 2, 3, 4, 10 + i] for i in range(4)]
    outer = [[1, 2, 20 + i, 30 + i, 40 + i] for i in range(4)]
    tables = tables_of(*inner, *outer, [1, 2, 3, 4, 5])
    found = find_shared([1] * 8 + [2], [600] * 9, StepTables.of(tables), 128, 64)
    assert [(sorted(p.sequences), p.keys) for p in found] == [(list(range(8)), 256), ([0, 1, 2, 3], 512)]
    assert plan([1] * 8 + [2], [600] * 9, found).prefixes is not None
    short = find_shared([1] * 8, [256] * 8, StepTables.of(tables[:8]), 128, 64)
    assert short == [], "all of block 2 but its last key is before the query"


def test_little_that_is_shared_is_left_alone() -> None:
    same = tables_of(*[[1, 2, 10 + i] for i in range(9)])
    assert find_shared([1] * 9, [50] * 9, StepTables.of(same), 16, 64) == []
    few = tables_of(*[[1, 2, 10 + i] for i in range(3)])
    assert find_shared([1] * 3, [600] * 3, StepTables.of(few), 256, 64) == []
    apart = tables_of(*[[i, 9, 9] for i in range(8)])
    assert find_shared([1] * 8, [600] * 8, StepTables.of(apart), 256, 64) == []
    assert find_shared([], [], StepTables.of(np.zeros((0, 3), np.int32)), 256, 64) == []


@st.composite
def steps(draw) -> tuple[list[int], list[int], np.ndarray]:
    """Query lengths, contexts and tables of sequences whose blocks come of a tree; blocks of 16 keys.

    Few different blocks, the first one among them, which is also what tables are padded with; contexts that end
    anywhere, within blocks that others share, too.
    """
    width = draw(st.integers(1, 8))
    trunk = draw(st.lists(st.integers(0, 9), min_size=width, max_size=width))
    lens, contexts, rows = [], [], []
    for _ in range(draw(st.integers(0, 12))):
        kept = draw(st.integers(0, width))
        rows.append(
            trunk[:kept] + draw(st.lists(st.integers(0, 2), min_size=width - kept, max_size=width - kept))
        )
        contexts.append(draw(st.integers(0, 16 * width)))
        used = -(-contexts[-1] // 16)
        rows[-1][used:] = [0] * (width - used)
        lens.append(draw(st.sampled_from((1, 1, 1, 1, 2))))
    return lens, contexts, np.array(rows, np.int32).reshape(len(rows), width)


def keys_in_common(tables: np.ndarray, contexts: list[int], one: int, other: int, unit: int) -> int:
    """Whole units in the same blocks, before both queries."""
    blocks = (min(contexts[one], contexts[other]) - 1) // 16
    while (tables[one, :blocks] != tables[other, :blocks]).any():
        blocks -= 1
    return blocks * 16 // unit * unit


@settings(max_examples=examples(100, 300), deadline=None)
@given(steps(), st.sampled_from((16, 32)), st.sampled_from((16, 48)), st.integers(2, 4))
def test_nothing_worth_a_level_is_missed(step, unit, least_keys, sharers) -> None:
    lens, contexts, tables = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "LEAST_SHARED_KEYS", least_keys)
        patch.setattr(attention_plan, "LEAST_SHARERS", sharers)
        found = find_shared(lens, contexts, StepTables.of(tables), 16, unit)
    taken = [0] * len(lens)
    for prefix in found:
        first, members = prefix.sequences[0], prefix.sequences
        assert len(set(members)) == len(members) >= sharers
        assert all(lens[i] == 1 for i in members)
        assert all(keys_in_common(tables, contexts, first, i, unit) >= prefix.keys for i in members)
        assert {taken[i] for i in members} == {taken[first]}, "levels nest"
        assert prefix.keys >= taken[first] + least_keys
        for i in members:
            taken[i] = prefix.keys
    singles = [i for i, queries in enumerate(lens) if queries == 1 and contexts[i] > 0]
    for i in singles:
        others = sorted(keys_in_common(tables, contexts, i, j, unit) for j in singles if j != i)
        if len(others) >= sharers - 1:
            assert taken[i] > others[-(sharers - 1)] - least_keys


def test_a_query_within_a_shared_block_does_not_stand_between_those_that_share_it() -> None:
    """The third sequence writes the last key of block 2; its table, padded with 0, is that of the first, in block 0."""
    tables = tables_of([1, 2, 0], [1, 2, 5], [1, 2], [1, 2, 7], [1, 2, 8])
    contexts = [2 * 256 + 9, 3 * 256, 2 * 256, 3 * 256, 3 * 256]
    found = find_shared([1] * 5, contexts, StepTables.of(tables), 256, 64)
    assert [(sorted(p.sequences), p.keys) for p in found] == [([0, 1, 2, 3, 4], 256), ([0, 1, 3, 4], 512)]


def test_levels_may_be_as_many_as_sequences() -> None:
    """Turn after turn of one long conversation."""
    count = 1500
    turns = np.tril(np.broadcast_to(np.arange(1, count + 1, dtype=np.int32), (count, count)))
    found = find_shared([1] * count, [256 * (i + 1) for i in range(count)], StepTables.of(turns), 256, 64)
    assert len(found) == count - attention_plan.LEAST_SHARERS
