"""Tests scheduler and KV cache with random arrivals, lengths, prefix trees, budgets and cache sizes."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.driver import Driver, Hopeful, driver_for, sequence
from tests.examples import examples

prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=0, max_size=3),  # path in a tree of shared prefixes
        st.integers(1, 20),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=25,
)


# launching a step takes the time of a few tokens, or of any prompt here
COSTS = [AdmissionCosts(launch_s, 0.0, 0.0, 1e-3, 1e-3, 1e-6) for launch_s in (4e-3, 1.0)]
# of one to three cache groups
windows = st.lists(st.sampled_from([None, None, 1, 2, 5, 9, 16, 30]), min_size=1, max_size=3).map(tuple)


@given(
    rows=prompts,
    blocks=st.integers(20, 60),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 12),
    budget=st.sampled_from([1, 3, 7, 64]),
    caching=st.booleans(),
    hopeful=st.booleans(),
    stops=st.sampled_from([0.0, 0.1, 0.5]),
    windows=windows,
    costs=st.sampled_from([None, None, *COSTS]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=examples(18, 300), deadline=None, print_blob=True)
def test_every_sequence_finishes_and_reads_only_its_own_prefix(
    rows, blocks, block_size, max_num_seqs, budget, caching, hopeful, stops, windows, costs, seed
):
    """Random arrivals, lengths, trees, early ends, preemptions and cache groups. `Driver` checks each step."""
    driver = driver_for(
        blocks=blocks * (4 // block_size),
        size=block_size,
        seqs=max_num_seqs,
        budget=budget,
        windows=windows,
        lengths=Hopeful() if hopeful else None,
        seed=seed,
        stops=stops,
        prefix_caching=caching,
        admission_costs=costs,
    )
    scheduler, pool = driver.scheduler, driver.scheduler.pool
    tokens = [[10 + branch for branch in path for _ in range(5)] + [99] * own for path, own, _ in rows]
    waiting = [
        sequence(tokens[key], out, key, exact=key % 3 == 0, shares_next=common(tokens, key))
        for key, (_, _, out) in enumerate(rows)
    ][::-1]
    arrivals = random.Random(seed)
    while waiting or scheduler.waiting or scheduler.running:
        for _ in range(arrivals.randrange(4)):
            if waiting:
                scheduler.add(waiting.pop())
        driver.step()
        assert driver.steps < 20_000, "the scheduler does not get ahead"
    event(f"preempted: {driver.preempted > 0}")
    event(f"shared: {driver.cached > 0}, windows: {set(windows) != {None}}")
    assert len(driver.finished) == len(rows)
    assert (pool.used, pool.cached) == (0, 0)
    assert caching or driver.cached == 0


def common(tokens: list[list[int]], row: int) -> int:
    """Return the number of tokens shared with the next row."""
    if row + 1 == len(tokens):
        return 0
    pairs = enumerate(zip(tokens[row], tokens[row + 1], strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(map(len, tokens[row : row + 2])))


@given(rows=prompts, windows=windows, seed=st.integers(0, 1 << 16))
@settings(max_examples=examples(16, 50), deadline=None, print_blob=True)
def test_waiting_rows_can_be_dropped_at_any_time(rows, windows, seed):
    sequences = [
        sequence([10 + b for b in path for _ in range(5)] + [99] * own, out, key, shares_next=3)
        for key, (path, own, out) in enumerate(rows)
    ]
    driver = driver_for(
        sequences, blocks=24, size=2, seqs=4, budget=16, windows=windows, lengths=Hopeful(), seed=seed
    )
    scheduler = driver.scheduler
    for _ in range(seed % 20):
        driver.step()
    scheduler.forget_waiting()
    scheduler.check_integrity()
    driver.drain()
    assert (scheduler.pool.used, scheduler.pool.cached) == (0, 0)


def test_rows_of_a_step_share_the_prefix_that_the_step_computes():
    step = driver_for([sequence([7] * 40 + [i], 4, i) for i in range(8)], blocks=64).step()
    assert [c.length for c in step.chunks] == [41] + [1] * 7
    assert step.cached_tokens == 7 * 40


def shared_rows(windows: tuple[int | None, ...], later: bool) -> tuple[Driver, list[Sequence]]:
    """Run two rows that share 40 tokens in sequence.

    Args:
        later: if True, the second row is added once the first row decodes.
    """
    rows = [sequence([7] * 40 + [i] * 3, 30, i, exact=True) for i in (1, 2)]
    driver = driver_for(rows[:1], blocks=200, seqs=1, windows=windows)
    if later:
        for _ in range(20):
            driver.step()
    driver.scheduler.add(rows[1])
    return driver, rows


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8), (9, None, 1)])
def test_a_prefix_is_kept_for_a_waiting_row_within_its_windows(windows):
    driver, (first, second) = shared_rows(windows, later=False)
    while first not in driver.finished:
        driver.step()
    # 10 blocks without a window. Before the next token, windows of 8 and 9 see 2 blocks, a window of 1 none
    kept = {None: 10, 8: 2, 9: 2, 1: 0}
    assert driver.scheduler.pool.cached == sum(kept[window] for window in windows)
    driver.drain()
    assert second.cached_tokens == 40


@pytest.mark.parametrize(("windows", "found"), [((None,), 40), ((None, 100), 40), ((None, 8), 0), ((8,), 0)])
def test_a_prefix_whose_end_a_window_has_lost_is_computed_again(windows, found):
    driver, (_, second) = shared_rows(windows, later=True)
    driver.drain()
    assert second.cached_tokens == found
    assert driver.preempted == 0


def test_the_youngest_row_is_preempted_and_admitted_again_first():
    old, young = sequence([1, 2], 4, 1), sequence([3, 4], 4, 2)
    driver = driver_for([old, young], blocks=6, size=1, seqs=2, lengths=Hopeful(), prefix_caching=False)
    while not driver.preempted:
        driver.step()
    assert (young.preemptions, old.preemptions) == (1, 0)
    assert driver.scheduler.waiting[0] is young
    driver.drain()
    assert driver.finished == [old, young]


def test_a_sequence_larger_than_the_cache_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"17 tokens need 5 KV blocks and there are 4"):
        driver_for([sequence([1] * 10, 7)], blocks=4)


def pool_with_cached_chain(turns: list[list[int]]) -> tuple[BlockPool, list[int]]:
    """Return a pool with an idle block for each list of turns that reserve it."""
    pool = BlockPool(len(turns), 1)
    blocks = pool.allocate(len(turns))
    for i, block in enumerate(blocks):
        pool.register(block, bytes([i]))
        for turn in turns[i]:
            pool.reserve([bytes([i])], turn)
    pool.release(blocks)
    return pool, blocks


def kept(pool: BlockPool) -> list[int]:
    return [i for i in range(pool.total) if pool.find(bytes([i])) is not None]


def test_cached_blocks_are_evicted_children_first():
    pool, _ = pool_with_cached_chain([[1], [1], [1]])
    pool.allocate(1)
    assert kept(pool) == [0, 1]
    pool.allocate(1)
    assert kept(pool) == [0]


def test_the_block_with_the_latest_next_use_is_evicted_first():
    pool, _ = pool_with_cached_chain([[5, 6], [2, 9], [7]])
    pool.allocate(1)
    assert kept(pool) == [0, 1]
    pool.reserve([bytes([0])], 1)  # a preempted sequence is back, and wants it before all others
    pool.allocate(1)
    assert kept(pool) == [0]


def test_a_block_is_free_once_no_row_uses_it_or_waits_for_it():
    pool, blocks = pool_with_cached_chain([[1, 2], []])
    assert kept(pool) == [0]
    pool.unreserve([bytes([0])], 1)
    assert kept(pool) == [0]
    pool.acquire(blocks[:1])
    pool.unreserve([bytes([0])], 2)
    assert kept(pool) == [0]
    pool.release(blocks[:1])
    assert (kept(pool), pool.available, pool.cached) == ([], 2, 0)


def test_a_token_run_again_is_prefill_however_short_its_chunk():
    """Counted as a decode, it made `prefill - recomputed` in the progress negative."""
    seq = sequence(list(range(4)), 8)
    seq.tokens.extend([7, 7])
    # preempted after five tokens; four of them run again so far
    seq.computed, seq.computed_before_preemption = 4, 5
    again, new = Chunk(seq, 4, 1), Chunk(seq, 5, 1)
    assert (again.recomputed, again.decodes) == (1, 0)
    assert (new.recomputed, new.decodes) == (0, 1)
