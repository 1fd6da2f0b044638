"""Groups of queries with common leading blocks, compared with all pairs of sequences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.attention_plan import CachePages, attention_items
from batchinfer_kernels.prefix_groups import GroupMinimum, Ints, PrefixGroup, prefix_groups
from batchinfer_kernels.step_tables import StepTables
from tests.examples import examples

BLOCK = 16
Found = tuple[tuple[int, ...], int, int, int]  # sequences in ascending order, first unit, end, level


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    """Draw query lengths, contexts and tables of sequences whose blocks form a tree.

    Few different blocks, including the padding block; contexts end anywhere, also within shared blocks.
    """
    width = draw(st.integers(1, 8))
    trunk = draw(st.lists(st.integers(0, 9), min_size=width, max_size=width))
    lens, contexts, rows = [], [], []
    for _ in range(draw(st.integers(0, 12))):
        kept = draw(st.integers(0, width))
        own = draw(st.lists(st.integers(0, 2), min_size=width - kept, max_size=width - kept))
        lens.append(draw(st.sampled_from((1, 1, 1, 1, 2, 5))))
        contexts.append(draw(st.integers(lens[-1], max(lens[-1], BLOCK * width))))
        used = -(-contexts[-1] // BLOCK)
        rows.append([*(trunk[:kept] + own)[:used], *[0] * (width - used)])
    return lens, contexts, np.array(rows, np.int32).reshape(len(rows), width)


def in_common(tables: np.ndarray, before: list[int], one: int, other: int) -> int:
    """Return the number of equal leading blocks before all queries.

    Args:
        before: number of tokens before the queries of each sequence.
    """
    blocks = min(before[one], before[other]) // BLOCK
    return next((b for b in range(blocks) if tables[one, b] != tables[other, b]), blocks)


def by_comparing(
    step: tuple[list[int], list[int], np.ndarray], units: int, worth: GroupMinimum, most_queries: int
) -> Iterator[Found]:
    """Yield groups by comparing all pairs. `units`: blocks per unit."""
    lens, contexts, tables = step
    before = [context - queries for context, queries in zip(contexts, lens, strict=True)]

    def shared(one: int, other: int) -> int:
        return in_common(tables, before, one, other) // units

    def inside(members: set[int], taken: int, level: int) -> Iterator[Found]:
        if len(members) < worth.sequences:
            return
        common = min(shared(i, j) for i in members for j in members if i != j)
        if common >= taken + worth.units:
            yield tuple(sorted(members)), taken, common, level
            taken, level = common, level + 1
        while members:
            first = min(members)
            together = {i for i in members if i == first or shared(first, i) >= taken + worth.units}
            yield from inside(together, taken, level)
            members = members - together

    yield from inside({i for i, queries in enumerate(lens) if queries <= most_queries}, 0, 0)


def as_found(groups: list[PrefixGroup]) -> list[Found]:
    return [(tuple(sorted(g.sequences.tolist())), g.first, g.end, g.level) for g in groups]


@settings(max_examples=examples(50, 400), deadline=None)
@given(steps(), st.sampled_from((1, 2)), st.integers(1, 3), st.integers(2, 4), st.sampled_from((1, 4)))
def test_groups_equal_those_found_by_comparison(step, units, least, sharers, most_queries) -> None:
    lens, contexts, tables = step
    worth = GroupMinimum(sharers, least)

    def whole(blocks: Ints) -> Ints:
        return blocks // units

    groups = prefix_groups(lens, contexts, StepTables.of(tables), BLOCK, whole, worth, most_queries)
    assert sorted(as_found(groups)) == sorted(by_comparing(step, units, worth, most_queries))
    ends = dict.fromkeys(range(len(lens)), (0, 0))
    for group in groups:  # outer ones come first, and each begins where the one around it ends
        assert {ends[i] for i in group.sequences.tolist()} == {(group.first, group.level)}
        ends |= dict.fromkeys(group.sequences.tolist(), (group.end, group.level + 1))


def turns(count: int) -> np.ndarray:
    """Return tables of `count` rows: successive turns of one long conversation."""
    return np.tril(np.broadcast_to(np.arange(1, count + 1, dtype=np.int32), (count, count)))


def test_a_cpus_plan_holds_as_many_levels() -> None:
    count = 1200
    pages = CachePages(BLOCK, 8, 1)
    items = attention_items([1] * count, [BLOCK * (i + 1) for i in range(count)], 1, turns(count), pages)
    assert items.levels > 1000


@pytest.mark.parametrize(
    "step", [([], [], np.zeros((0, 3), np.int32)), ([1] * 3, [9] * 3, np.zeros((3, 0), np.int32))]
)
def test_an_empty_step_has_no_groups(step) -> None:
    lens, contexts, tables = step
    assert (
        prefix_groups(lens, contexts, StepTables.of(tables), BLOCK, lambda blocks: blocks, GroupMinimum(2, 1))
        == []
    )
