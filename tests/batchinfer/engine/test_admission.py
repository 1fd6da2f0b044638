"""Tests when rows are admitted: no preemption if lengths are known, few if they are not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.admission import peak_blocks
from batchinfer.engine.schedule.batched_admission import IDLE, AdmissionCosts, BatchedAdmission
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.budget import admission_costs
from batchinfer.engine.schedule.output_lengths import BINS, OutputLengths
from batchinfer.engine.schedule.scheduler import Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.driver import Driver, driver_for, sequence
from tests.batchinfer.engine.simulation import Row, simulate
from tests.examples import examples, first_of
from tests.model_costs import llama_cost

COSTS = AdmissionCosts(5e-3, 1e-3, 1e-6, 2e-3, 1e-5, 1e-8)
MODEL = llama_cost(16, 2048, 8192, 32, 8, 64, 128_256, 2, 2)


def steps_until_filled(
    costs: AdmissionCosts, every: int, prompt: int, places: int = 100, read: int = 0, at_once: int = 1
) -> int:
    """Return the number of steps until a freed slot is filled, if a sequence ends every `every` steps."""
    admission = BatchedAdmission(costs)
    admission.stop(places)
    admission.prefill_tokens, admission.steps = read, at_once
    for step in range(1, 10 * places * every):
        admission.ended += step % every == 0
        if not admission.should_wait(places - admission.ended, 1000, 0, 8192, lambda n: n * prompt):
            return step
    raise AssertionError("places stay empty")


def test_slots_are_filled_when_waiting_has_cost_as_much_as_filling():
    """Each step wastes 2 ms times the share of free slots: 1, 3, 6, … % of 2 ms. Filling them takes the host
    6.1 ms. The device works for 2 ms of it in the step itself, and for 0.9 ms more in the step before."""
    filled = steps_until_filled(COSTS, every=1, prompt=0)
    wasted = [2e-3 * sum(range(1, steps + 1)) / 100 for steps in (filled - 1, filled)]
    assert wasted[0] < 3.2e-3 <= wasted[1] < 3.6e-3
    assert steps_until_filled(replace(COSTS, launch_s=2e-3), 1, 0) < filled
    assert steps_until_filled(COSTS, every=1, prompt=20) < filled, "prompts hide a part of launching them"


def test_free_slots_waste_time_in_each_step_of_a_launch():
    """A sequence ends with each launch."""
    single, four = (steps_until_filled(COSTS, every=1, prompt=0, at_once=steps) for steps in (1, 4))
    assert single / 2 <= four < single / 2 + 1, "the waste grows with the square of launches"


def test_prompts_that_keep_the_device_busy_do_not_wait():
    assert steps_until_filled(COSTS, every=1, prompt=1000) == 1
    assert steps_until_filled(COSTS, every=7, prompt=1000) == 7
    assert steps_until_filled(COSTS, every=1, prompt=300, read=1000) == 1, "nor rows after other prompts"


def test_without_peaks_only_host_time_counts():
    unknown = admission_costs(MODEL, None)
    assert (unknown.weights_s, unknown.token_s, unknown.kv_token_s) == (0, 0, 0)
    known = admission_costs(MODEL, Peaks(760e12, 3e12))
    assert unknown.launch_s == known.launch_s < admission_costs(MODEL, None, pieces=False).launch_s
    assert steps_until_filled(unknown, 1, 300) >= steps_until_filled(known, 1, 300)


@given(st.integers(1, 300), st.integers(0, 400), st.integers(1, 400), st.integers(0, 300))
def test_a_fifth_of_the_places_and_all_that_waits_are_never_held_back(places, ended, waiting, prompt):
    admission = BatchedAdmission(replace(COSTS, launch_s=1e9))
    admission.stop(places)
    admission.ended = min(ended, places)
    held = admission.should_wait(places - admission.ended, waiting, 0, 1 << 30, lambda n: n * prompt)
    full = admission.ended >= min(places // IDLE, waiting) or admission.ended == places
    assert held == (not full)
    assert not BatchedAdmission(None).should_wait(places, waiting, 0, 10, lambda n: n), (
        "a CPU fills each place at once"
    )


def walked(ends: list[tuple[int, Sequence]], size: int) -> int:
    """Return the peak of blocks by walking through all steps, for sequences that share leading blocks."""
    peak = 0
    for step in range(max(s for s, _ in ends) + 1):
        alive = [seq for last, seq in ends if step <= last]
        tables = [(seq.tables[0] if seq.tables else [], seq) for seq in alive]
        blocks = {
            (at, table[at]) if at < len(table) else (at, id(seq))
            for table, seq in tables
            for at in range(-(-(len(seq) + step) // size))
        }
        peak = max(peak, len(blocks))
    return peak


def places_taken(launch_s: float, prompt: int, outputs: list[int]) -> list[int]:
    """Return the number of rows that each later step admits, with 10 slots and these output lengths."""
    costs = AdmissionCosts(launch_s, 0.0, 0.0, 0.01, 0.001, 0.0) if launch_s else None
    rows = [sequence([key] * prompt, output, key, exact=True) for key, output in enumerate(outputs)]
    driver = driver_for(rows, blocks=1000, seqs=10, budget=100, admission_costs=costs)
    taken = []
    while driver.scheduler.running or driver.scheduler.waiting:
        taken.append(sum(chunk.start == 0 for chunk in driver.step().chunks))
    return taken[1:]


def test_rows_are_admitted_together_if_mixed_steps_are_expensive():
    ends = [*range(2, 12), 5, 5, 5]  # one of the first ten ends in each step from the second on
    assert places_taken(0, 3, ends)[:4] == [0, 1, 1, 1]
    assert places_taken(1, 3, ends)[:5] == [0, 0, 2, 1, 0], "a fifth of the places, then what is left"
    assert places_taken(0.015, 6, ends)[:4] == [0, 1, 1, 1], "prompts hide what launching them takes"
    assert places_taken(1, 99, ends) == places_taken(0, 99, ends), "a prompt that fills a step does not wait"


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=9
    ),
    size=st.sampled_from([1, 2, 3, 16]),
)
@settings(max_examples=examples(40, 200), deadline=None, print_blob=True)
def test_the_forecast_equals_a_walk_through_all_steps(rows, size):
    """Each row shares 0 to 3 leading blocks with the rows that share at least this number."""
    pool = BlockPool(4000, size)
    chain = pool.allocate(3)
    ends = []
    for shared, own, steps in rows:
        seq = sequence([1] * (shared * size + own), 50)
        pool.acquire(chain[:shared])
        seq.tables, seq.freed = [chain[:shared] + pool.allocate(-(-own // size) // 2)], [0]
        ends.append((steps, seq))
    pool.release(chain)
    assert peak_blocks(ends, BlockTables(pool, (None,))) == walked(ends, size)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=40
    ),
    blocks=st.integers(34, 80),
    budget=st.sampled_from([16, 64, 512]),
    windows=st.sampled_from([(None,), (5,), (None, 9), (None, 1, 1), (30, None, 6)]),
)
@settings(max_examples=examples(15, 200), deadline=None, print_blob=True)
def test_nothing_is_preempted_when_lengths_are_known(rows, blocks, budget, windows):
    """Rows have any shared prefixes, and layers any windows."""
    sequences = [
        sequence([99] * shared + [key] * prompt, output, key, exact=True)
        for key, (shared, prompt, output) in enumerate(rows)
    ]
    driver = driver_for(sequences, blocks=blocks, seqs=16, budget=budget, windows=windows)
    driver.drain()
    assert driver.preempted == 0


class FullDriver(Driver):
    """Checks the queue after a row has ended, if the step had tokens to spare."""

    refused, ended = 0, 0

    def check_limits(self, step: Step) -> None:
        super().check_limits(step)
        scheduler = self.scheduler
        spare = scheduler.config.max_num_batched_tokens - sum(c.length for c in step.chunks)
        ended, self.ended = self.ended, len(self.finished)
        if self.ended > ended and scheduler.waiting and len(scheduler.waiting[0]) <= spare:
            everyone = (*scheduler.running, scheduler.waiting[0])
            ends = [(s.max_length - len(s) - 1, s) for s in everyone]
            assert len(scheduler.running) == scheduler.config.max_num_seqs or (
                walked(ends, scheduler.pool.block_size) > scheduler.pool.total
            )
            self.refused += 1


def test_a_batch_is_as_full_as_memory_permits():
    """Whenever a row waits, admitting it would overflow the cache before the running rows end."""
    rng = random.Random(8)
    rows = [sequence([key] * rng.randint(5, 80), rng.randint(5, 120), key, exact=True) for key in range(60)]
    driver = driver_for(rows, blocks=300, seqs=64, budget=512, kind=FullDriver)
    scheduler = driver.scheduler
    used = []
    while scheduler.waiting:
        driver.step()
        used.append(scheduler.pool.used)
    assert isinstance(driver, FullDriver)
    assert driver.refused > 10
    assert driver.preempted == 0
    assert sum(used) / len(used) > 0.8 * scheduler.pool.total


def answers(kind: str, rng: random.Random) -> Iterator[int]:
    """Yield output lengths of rows with a limit of 512, or of 2048 for longer ones."""
    for row in range(200 if kind == "ever longer" else examples(100, 400)):
        if kind == "exponential":
            yield max(1, min(512, round(rng.expovariate(1 / 64))))
        elif kind == "two peaks":
            yield rng.randint(1, 8) if rng.random() < 0.5 else rng.randint(410, 512)
        elif kind == "longest":
            yield 512
        else:  # the plan sorts by length, so short answers may be followed by long ones
            yield rng.randint(5, 20) if row < 100 else rng.randint(300, 450)


@pytest.mark.parametrize("kind", first_of(("exponential", "ever longer", "longest", "two peaks"), 1))
def test_wrong_estimates_cost_little_and_never_thrash(kind):
    """Compares runs with known lengths with runs that estimate them."""
    rng, longer = random.Random(4), kind == "ever longer"
    rows = [(rng.randint(20, 300), output) for output in answers(kind, rng)]
    limits, most = {"blocks": 250 if longer else 800, "budget": 512}, 2048 if longer else 512
    known = simulate([Row(*row) for row in rows], **limits)
    guessed = simulate([Row(*row, most) for row in rows], **limits)
    assert known.preemptions == 0
    # A few at the start, while lengths are unknown, for any number of rows
    assert guessed.preemptions <= 0.25 * len(rows) + 5
    assert guessed.recomputed_tokens <= 0.15 * guessed.tokens
    assert guessed.seconds <= 1.15 * known.seconds


def test_short_answers_do_not_leave_the_batch_half_empty():
    """With max_tokens the cache is full with 12 rows. Answers are a fiftieth of that: 64 rows run at once
    soon."""
    rng = random.Random(1)
    rows = [Row(32, 1 + round(rng.expovariate(1 / 40)), max_tokens=2000) for _ in range(800)]
    got = simulate(rows, blocks=1600, seqs=64, budget=512)
    assert got.running / got.steps > 40
    assert got.preemptions == 0


def test_a_preempted_row_is_admitted_again_only_if_it_can_end():
    first, second = sequence([1] * 4, 12, 1, exact=True), sequence([2] * 4, 12, 2)
    driver = driver_for([first, second], blocks=20, size=1, budget=64, prefix_caching=False)
    second.preemptions, scheduler = 1, driver.scheduler
    while first in scheduler.running or not driver.steps:
        driver.step()
        assert second not in scheduler.running or len(driver.finished)
    driver.drain()
    assert driver.preempted == 0


def test_estimates_follow_ended_and_running_rows():
    lengths, fresh = OutputLengths(), sequence([1], 3200)
    fresh.arrival = 1  # its quantile is the golden ratio's 0.62
    lengths.update([])
    assert lengths.expected_length(fresh) == fresh.max_length, "nothing is known, so all may be needed"
    for _ in range(30):
        ended = sequence([1], 3200)
        ended.tokens.extend([0] * 100)
        lengths.record(ended)
    lengths.update([])
    assert lengths.expected_length(fresh) <= 1 + 3 * 3200 // BINS
    survivors = [sequence([1], 3200) for _ in range(300)]
    for survivor in survivors:
        survivor.tokens.extend([0] * 1600)
    lengths.update(survivors)
    assert lengths.expected_length(fresh) == fresh.max_length, "the longer rows end last"
    assert all(lengths.expected_length(s) > len(s) for s in survivors)
