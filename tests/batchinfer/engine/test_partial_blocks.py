"""Tests rows that share a prefix of any number of tokens: they run only the rest, with unchanged answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.engine.schedule.scheduler import Step
from tests.batchinfer.engine.driver import Driver, distinct_tokens, driver_for, sequence
from tests.examples import examples

ENOUGH = 60  # longest rows that the cache has room for


@st.composite
def trees(draw: Any) -> list[list[int]]:
    """Return rows of a tree of three levels, depth first. No row is a prefix of another one."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    longest = [draw(st.sampled_from([2, 9, 40, 150])) for _ in range(3)]
    branches = [draw(st.integers(1, 5)) for _ in range(3)]
    vocab = draw(st.sampled_from([3, 1000]))  # of few tokens, levels that ought to differ begin alike

    def level(number: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(1, longest[number]))]

    rows: list[list[int]] = []
    for _ in range(branches[0]):
        first = level(0)
        for _ in range(branches[1]):
            second = first + level(1)
            rows += [second + level(2) + [vocab + len(rows) + number] for number in range(branches[2])]
    return rows


def ran(rows: list[list[int]], outputs: int, size: int, room: float, **limits: Any) -> tuple[Driver, int]:
    """Run rows that all wait from the start; return the driver and the number of prompt tokens run.

    Args:
        room: size of the cache, in longest rows.
    """
    blocks = int(room * (-(-(max(map(len, rows)) + 8) // size) + 1))
    sequences = [sequence(row, outputs, key, exact=True) for key, row in enumerate(rows)]
    driver = driver_for(sequences, blocks=blocks, size=size, **limits)
    driver.drain()
    assert len(driver.finished) == len(rows)
    return driver, driver.ran - len(rows) * (outputs - 1)


@given(
    rows=trees(),
    size=st.integers(1, 64),
    seqs=st.sampled_from([1, 5, 64]),
    budget=st.sampled_from([17, 256, 4096]),
    shuffled=st.booleans(),
)
@settings(max_examples=examples(10, 300), deadline=None, print_blob=True)
def test_each_token_of_a_tree_runs_once(
    rows: list[list[int]], size: int, seqs: int, budget: int, shuffled: bool
) -> None:
    """With any block size and any order, while all rows wait."""
    if shuffled:
        random.Random(size).shuffle(rows)
    driver, tokens = ran(rows, 4, size, ENOUGH, seqs=seqs, budget=budget)
    event(f"copied: {driver.copied > 0}")
    assert distinct_tokens(rows) <= tokens <= 1.02 * distinct_tokens(rows)
    assert tokens + driver.cached == sum(map(len, rows))


@given(
    rows=trees(),
    size=st.sampled_from([3, 16, 33]),
    room=st.sampled_from([1.0, 1.5, 4.0]),
    windows=st.sampled_from([(None,), (7,), (None, 20), (5, None, 64)]),
    seqs=st.sampled_from([2, 30]),
)
@settings(max_examples=examples(12, 200), deadline=None, print_blob=True)
def test_every_row_ends_with_little_memory(
    rows: list[list[int]], size: int, room: float, windows: tuple[int | None, ...], seqs: int
) -> None:
    """`Driver` checks the tokens that rows read, the scheduler the kept blocks."""
    driver, _ = ran(rows, 6, size, room, seqs=seqs, budget=64, windows=windows)
    event(f"copied: {driver.copied > 0}, preempted: {driver.preempted > 0}")
    pool = driver.scheduler.pool
    assert (pool.used, pool.cached) == (0, 0)


def rows_of_one_step(*rows: list[int]) -> Step:
    return driver_for([sequence(row, 4, key) for key, row in enumerate(rows)], blocks=64, size=16).step()


def test_rows_of_one_step_copy_from_one_another() -> None:
    """The third row shares the most with the second. It copies from the first row, as the second row's copies
    are made in the same step."""
    step = rows_of_one_step([7] * 20 + [1] * 5, [7] * 20 + [2] * 9, [7] * 20 + [2] * 6 + [3] * 4)
    first, second, third = (chunk.sequence.tables[0][1] for chunk in step.chunks)
    assert [chunk.length for chunk in step.chunks] == [25, 9, 4]
    assert [tuple(copy[2:]) for copy in step.copies] == [
        (first, second, 0, 4),
        (first, third, 0, 4),
        (second, third, 4, 10),
    ]
    assert (step.cached_tokens, step.copied_tokens) == (20 + 26, 4 + 10)


def test_the_block_in_which_a_prompt_ends_is_copied_too() -> None:
    step = rows_of_one_step([5] * 19, [5] * 19, [5] * 18 + [6] * 3)
    assert [chunk.length for chunk in step.chunks] == [19, 1, 3]


def test_one_source_block_is_kept_for_all_waiting_rows() -> None:
    """The first row ends before the others are admitted; its block stays until the last one is."""
    rows = [sequence([7] * 23 + [10 + key] * 30, 4, key, exact=True) for key in range(6)]
    driver = driver_for(rows, blocks=40, size=16, seqs=1)
    scheduler = driver.scheduler
    while len(driver.finished) < 5:
        driver.step()
        waiting = len(scheduler.waiting)
        assert scheduler.pool.cached <= 2
        assert waiting == 0 or scheduler.pool.cached + scheduler.pool.used > 1
    driver.drain()
    assert driver.copied == 5 * 7
    assert scheduler.pool.cached == 0


def test_a_source_block_is_not_reassigned_before_it_is_copied() -> None:
    """A block that rows of this step copy may not be given to a row that writes."""
    rows = [sequence([7] * 23 + [1] * 20, 2, 0, exact=True)]
    rows += [sequence([7] * 23 + [10 + n] * (20 + n), 20, n, exact=True) for n in range(1, 6)]
    driver = driver_for(rows, blocks=9, size=16, seqs=4)
    driver.drain()
    assert driver.copied > 0


@pytest.mark.parametrize("caching", [False, True])
def test_nothing_is_copied_if_it_is_not_faster(caching: bool) -> None:
    rows = [sequence([7] * 20 + [key] * 5, 4, key) for key in range(3)]
    least = None if caching else 1
    step = driver_for(rows, blocks=64, size=16, prefix_caching=caching, least_copied=least).step()
    assert not step.copies
    assert step.cached_tokens == (32 if caching else 0)


def test_rows_that_are_rotated_in_another_way_share_nothing() -> None:
    roots = ContentRoots(1000, long_rope_beyond=30)
    rows = [sequence([7] * 20 + [key] * 5, most, key, roots=roots) for key, most in enumerate((5, 6))]
    assert [row.rope_offset for row in rows] == [0, 1000]
    assert not driver_for(rows, blocks=64, size=16).step().copies


def test_source_blocks_are_not_held_for_a_row_that_does_not_fit() -> None:
    """The last row needs the whole cache and waits for a row that left with a step in flight."""
    common = list(range(10))
    first = sequence([*common, 50], 1, 0, exact=True)
    other = sequence([70, 71], 1, 1, exact=True)
    last = sequence([*common, *range(100, 111)], 3, 2, exact=True)
    scheduler = driver_for([first, other, last], blocks=6, budget=64).scheduler
    step = scheduler.schedule()
    assert [chunk.sequence for chunk in step.chunks] == [first, other]
    scheduler.record_launch(step)
    scheduler.finish(first)
    scheduler.stop(other)
    assert not scheduler.schedule().chunks
    assert not scheduler.pool.pinned
    scheduler.release(other)
    step = scheduler.schedule()
    assert [chunk.sequence for chunk in step.chunks] == [last]
    assert step.preemptions == 0
