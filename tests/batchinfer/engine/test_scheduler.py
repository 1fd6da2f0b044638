"""Scheduler and KV cache under random arrivals, lengths, prefix trees, budgets and cache sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.scheduler import Chunk, Scheduler, SchedulerConfig, Step
from batchinfer.engine.sequence import Sequence
from batchinfer.request import Request, SamplingParams


def sequence(tokens: list[int], max_tokens: int, key: int = 0) -> Sequence:
    request = Request(
        key.to_bytes(32, "big"), np.array(tokens, np.int32), SamplingParams(max_tokens=max_tokens)
    )
    return Sequence.of(request, 10_000, None, 0.0)


class Driver:
    """Runs steps as the engine does, and knows what every cached slot holds, so that sharing can be checked."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler, self.random = scheduler, random.Random(seed)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) → tokens up to this one
        self.finished: list[Sequence] = []
        self.cached = self.preempted = self.steps = 0

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_limits(step)
        size = self.scheduler.pool.block_size
        for chunk in step.chunks:
            tokens = chunk.sequence.tokens
            for at in range(chunk.start, chunk.end):
                self.slots[chunk.sequence.blocks[at // size], at % size] = tuple(tokens[: at + 1])
        for chunk in step.chunks:
            self.check_reads(chunk.sequence, chunk.end)
        for chunk in step.chunks:
            self.post_process(chunk.sequence, chunk.end, chunk.samples)
        self.scheduler.check_integrity()
        self.cached += step.cached_tokens
        self.preempted += step.preemptions
        self.steps += 1
        return step

    def check_limits(self, step: Step) -> None:
        config = self.scheduler.config
        assert sum(c.length for c in step.chunks) <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert len({id(c.sequence) for c in step.chunks}) == len(step.chunks)
        assert all(c.length >= 1 for c in step.chunks)

    def check_reads(self, seq: Sequence, end: int) -> None:
        """Everything that attention reads is this sequence's own prefix."""
        size = self.scheduler.pool.block_size
        for at in range(end):
            assert self.slots[seq.blocks[at // size], at % size] == tuple(seq.tokens[: at + 1])

    def post_process(self, seq: Sequence, end: int, samples: bool) -> None:
        seq.computed = end
        seq.high_water = max(seq.high_water, end)
        if samples:
            seq.tokens.append(self.random.randrange(3))
            if len(seq) >= seq.max_length or self.random.random() < 0.1:
                self.scheduler.finish(seq)
                self.finished.append(seq)


prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=0, max_size=3),  # path in a tree of shared prefixes
        st.integers(1, 20),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=25,
)


@given(
    rows=prompts,
    blocks=st.integers(20, 60),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 12),
    budget=st.sampled_from([1, 3, 7, 64]),
    caching=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=150, deadline=None)
def test_every_sequence_finishes_and_reads_only_its_own_prefix(
    rows, blocks, block_size, max_num_seqs, budget, caching, seed
):
    pool = BlockPool(blocks * (4 // block_size), block_size)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs, budget, caching), pool)
    driver = Driver(scheduler, seed)
    waiting = [
        sequence([10 + branch for branch in path for _ in range(5)] + [99] * own, out, key)
        for key, (path, own, out) in enumerate(rows)
    ]
    arrivals = random.Random(seed)
    while waiting or scheduler.waiting or scheduler.running:
        for _ in range(arrivals.randrange(4)):
            if waiting:
                scheduler.add(waiting.pop())
        driver.step()
        assert driver.steps < 20_000, "the scheduler does not get ahead"
    event(f"preempted: {driver.preempted > 0}")
    event(f"shared: {driver.cached > 0}")
    assert len(driver.finished) == len(rows)
    assert pool.used == 0
    assert caching or driver.cached == 0


def test_rows_of_one_step_share_the_prefix_that_is_computed_in_it():
    pool = BlockPool(64, 4)
    scheduler = Scheduler(SchedulerConfig(8, 256), pool)
    for i in range(8):
        scheduler.add(sequence([7] * 40 + [i], 4, i))
    step = scheduler.schedule()
    assert [c.length for c in step.chunks] == [41] + [1] * 7
    assert step.cached_tokens == 7 * 40
    scheduler.check_integrity()


def test_the_youngest_is_preempted_and_comes_back_first():
    pool = BlockPool(6, 1)
    scheduler = Scheduler(SchedulerConfig(2, 64, prefix_caching=False), pool)
    old, young = sequence([1, 2], 4, 1), sequence([3, 4], 4, 2)
    scheduler.add(old)
    scheduler.add(young)
    driver = Driver(scheduler, 3)
    driver.random.random = lambda: 1.0  # type: ignore[method-assign]  # nobody stops early
    while not driver.preempted:
        driver.step()
    assert young.preemptions == 1
    assert old.preemptions == 0
    assert scheduler.waiting[0] is young
    while scheduler.running or scheduler.waiting:
        driver.step()
    assert driver.finished == [old, young]


def test_a_sequence_larger_than_the_cache_is_refused_with_the_numbers():
    scheduler = Scheduler(SchedulerConfig(2, 64), BlockPool(4, 4))
    with pytest.raises(ValueError, match=r"17 tokens need 5 KV blocks and there are 4"):
        scheduler.add(sequence([1] * 10, 7))


def test_cached_blocks_are_evicted_children_first():
    pool = BlockPool(3, 1)
    blocks = [pool.allocate() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.register(block, bytes([i]))
    pool.release(blocks)
    pool.allocate()
    assert pool.find(bytes([0])) is not None
    assert pool.find(bytes([2])) is None


def test_integrity_check_notices_a_leak():
    pool = BlockPool(3, 1)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])


def test_a_token_run_again_is_prefill_however_short_its_chunk():
    """Counted as a decode, it made `prefill - recomputed`, which the progress adds up, negative."""
    seq = sequence(list(range(4)), 8)
    seq.tokens.extend([7, 7])
    seq.computed, seq.high_water = 4, 5  # preempted after five tokens; four of them run again so far
    again, new = Chunk(seq, 4, 1), Chunk(seq, 5, 1)
    assert (again.recomputed, again.is_decode) == (1, False)
    assert (new.recomputed, new.is_decode) == (0, True)
