"""Pipeline stages: bounds on the duration of steps for any stage times, and waits of stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.ranks.division import UNDIVIDED, Division
from batchinfer.engine.ranks.shards import rank_shard
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.machine.links import DeviceLink
from batchinfer.models.parallel.shard_spec import rank_traffic, shard_spec
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.simulation.clock import Clock
from batchinfer.plan.simulation.simulator import SimulatedEngine, SimulatedTotals, simulate, simulated_steps
from batchinfer.plan.simulation.stages import SimulatedStage, StageSchedule, StageSends, StageWork
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import Peaks, StepShape
from tests.batchinfer.engine.simulation import Row
from tests.examples import first_of
from tests.model_costs import llama_spec

FREE = DeviceLink("free", math.inf, 0.0, 1.0)
SPEC = llama_spec(8, 512, 1408, 8, 4, 64, 32_000)
RANK = Peaks(1e12, 1e11)  # peaks of one rank
TIMES = st.floats(0, 10, allow_subnormal=False)
STEPS = st.integers(1, 4).flatmap(
    lambda stages: st.lists(
        st.lists(st.builds(StageWork, TIMES, TIMES), min_size=stages, max_size=stages),
        min_size=1,
        max_size=12,
    )
)


def last_hands_on_nothing(steps: list[list[StageWork]]) -> list[list[StageWork]]:
    return [[*work[:-1], StageWork(work[-1].seconds)] for work in steps]


@given(STEPS)
def test_a_schedule_keeps_its_bounds(steps: list[list[StageWork]]) -> None:
    """A stage runs one step at a time, a step ends after its last stage, and no stage waits without a reason. Running
    everything in sequence is the upper bound.
    """
    steps = last_hands_on_nothing(steps)
    schedule = StageSchedule(len(steps[0]))
    done = [schedule.run(work, 0.0, 0.0) for work in steps]
    assert done == sorted(done)
    slack = 1e-9 * (1 + done[-1])
    for stage in range(len(steps[0])):
        assert schedule.busy[stage] == pytest.approx(sum(sum(work[stage]) for work in steps))
        assert done[-1] >= schedule.busy[stage] - slack
    assert all(at >= sum(map(sum, work)) - slack for at, work in zip(done, steps, strict=True))
    assert done[-1] <= sum(sum(map(sum, work)) for work in steps) + slack
    assert -slack <= schedule.waited_s <= done[-1] + slack


@given(STEPS, st.floats(0, 5))
def test_later_starts_never_end_earlier(steps: list[list[StageWork]], told: float) -> None:
    steps = last_hands_on_nothing(steps)
    early, late = StageSchedule(len(steps[0])), StageSchedule(len(steps[0]))
    for work in steps:
        first, second = early.run(work, 0.0, 0.0), late.run(work, told, told + 1)
        assert first <= second
        assert second >= told + 1


def test_equal_stages_only_wait_for_the_first_and_the_last_step() -> None:
    """m steps through p stages of one second each end after m + p - 1 seconds (the bubbles of GPipe)."""
    schedule = StageSchedule(4)
    done = [schedule.run([StageWork(1.0)] * 4, 0.0, 0.0) for _ in range(10)]
    assert done[-1] == 10 + 4 - 1
    assert schedule.waited_s == 3.0


def test_a_stage_keeps_what_it_made_until_the_next_one_takes_it() -> None:
    for third, end in (
        ((1, 0), 11.0),
        ((8, 0), 14.0),
    ):  # the first stage starts its third step after 6 seconds
        schedule = StageSchedule(2)
        steps = [[StageWork(first), StageWork(last)] for first, last in ((1, 5), (1, 5), third)]
        assert [schedule.run(work, 0.0, 0.0) for work in steps] == [6.0, 11.0, end]
    for stages, end in (
        (2, 8.0),
        (1, 1.0),
    ):  # the last of several stages starts a step when its results are requested
        assert StageSchedule(stages).run([StageWork(1.0)] * stages, 0.0, 0.0, asked_s=7.0) == end


def test_a_ring_sends_each_part_twice_round() -> None:
    link = DeviceLink("a link", 100.0, 0.5, share=0.5)
    assert link.send_s(100) == 2.5
    assert link.all_reduce_s(400, 4) == 2 * 3 * (2.0 + 0.5)
    assert link.all_gather_s(100, 4) == 3 * 2.5
    assert link.all_reduce_s(400, 1) == link.all_gather_s(400, 1) == 0


def stages_of(spec: ModelSpec, division: Division, link: DeviceLink) -> tuple[SimulatedStage, ...]:
    firsts = sorted(range(0, division.ranks, division.tensor), key=division.stage)
    parts = [shard_spec(spec, rank_shard(rank, division, spec)) for rank in firsts]
    return tuple(
        SimulatedStage(
            model_cost(part, 2),
            len(part.layers) / len(spec.layers),
            StageSends(rank_traffic(part, 2), division.tensor, link, link if not part.ends else None),
        )
        for part in parts
    )


def machine(
    spec: ModelSpec, division: Division = UNDIVIDED, link: DeviceLink = FREE, ahead: bool = False
) -> SimulatedEngine:
    stages = () if division.ranks == 1 else stages_of(spec, division, link)
    layout = one_group(spec.caches, 16)
    time = StepTime(RANK, host_step_s=1e-4)
    limits = SchedulerConfig(32, 512)
    cost = model_cost(spec, 2)
    return SimulatedEngine(
        cost, layout, 4000, limits, ContentRoots(4000), time, ahead, stages=stages, ranks=division.ranks
    )


def run(on: SimulatedEngine) -> SimulatedTotals:
    requests = [Row(100 + key % 60, 20 + key % 50).request(key) for key in range(96)]
    return simulate(on, requests, {request.key: request.params.max_tokens for request in requests})


def test_one_stage_of_everything_is_the_plain_simulation() -> None:
    for ahead in (False, True):
        plain = machine(SPEC, ahead=ahead)
        one = replace(plain, stages=(SimulatedStage(plain.cost, 1.0),))
        assert run(one) == run(plain)


@pytest.mark.parametrize("tensor", first_of([4, 2], 1))
def test_over_a_free_link_tensor_ranks_take_what_their_parts_cost(tensor: int) -> None:
    """At least the time of an engine with one rank's part, and slightly more than the time of the model divided by the
    ranks: each rank reads all norms and hidden states.
    """
    on = machine(SPEC, Division(tensor))
    divided, part = run(on), run(replace(machine(SPEC), cost=on.stages[0].cost))
    assert divided.seconds == part.seconds
    alone = run(machine(SPEC))
    alone_s, divided_s = (one.seconds - alone.steps * 1e-4 for one in (alone, divided))
    assert alone_s / tensor < divided_s < 1.5 * alone_s / tensor
    slower = run(machine(SPEC, Division(tensor), DeviceLink("slow", 1e9, 1e-5)))
    assert slower.seconds > divided.seconds


def test_a_collective_takes_what_the_traffic_says() -> None:
    """Two sums of hidden states per layer, one for the embeddings; then the best logit of each row, or all logits."""
    link = DeviceLink("a link", 1e9, 1e-5, share=1.0)
    (stage,) = stages_of(SPEC, Division(2), link)
    sums = (2 * 8 + 1) * 2 * (100 * 512 * 2 / 2 / 1e9 + 1e-5)
    assert stage.sends.sums_s(100, 10) == pytest.approx(sums + 10 * 16 / 1e9 + 1e-5)
    asks = replace(stage.sends, all_logits=True)
    assert asks.sums_s(100, 10) == pytest.approx(sums + 10 * 16_000 * 4 / 1e9 + 1e-5)
    assert stage.sends.sums_s(100, 0) == pytest.approx(sums)


@pytest.mark.parametrize("stages", first_of([4, 2], 1))
def test_stages_take_at_least_what_the_slowest_one_takes(stages: int) -> None:
    division = Division(1, stages)
    found, alone = run(machine(SPEC, division)), run(machine(SPEC))
    assert found.sampled_tokens == alone.sampled_tokens
    assert found.steps > alone.steps, "each engine has only a part of the rows"
    assert 0 < found.waited_s < found.seconds
    assert alone.seconds / stages < found.seconds < alone.seconds
    slower = run(machine(SPEC, division, DeviceLink("slow", 1e7, 1e-3)))
    assert slower.seconds > found.seconds


def test_engines_that_take_turns_share_the_cache() -> None:
    on = replace(machine(SPEC, Division(1, 4)), blocks=250)
    requests = [Row(100, 30).request(key) for key in range(40)]
    samples = [output.sample for output in simulated_steps(on, requests, {one.key: 30 for one in requests})]
    assert {one.blocks_total for one in samples if one is not None} == {250 // 4 * 4}
    assert 125 < max(one.blocks_used for one in samples if one is not None) <= 250


def test_attention_of_a_stage_is_its_share() -> None:
    shape, whole = StepShape(64, 64, 64 * 900 * 8, 64 * 900 * 8), model_cost(SPEC, 2)
    parts = stages_of(SPEC, Division(1, 4), FREE)
    time = StepTime(RANK)
    apart = sum(stage.work(shape, 64, time).seconds for stage in parts)
    assert apart == pytest.approx(time.device_s(shape, whole, 64), rel=0.03)


def test_a_step_launched_ahead_starts_when_the_previous_step_has_its_tokens() -> None:
    """Steps of other engines do not wait."""
    work = [StageWork(1.0), StageWork(1.0)]
    for others, done_s in ((0, 4.0), (1, 4.0), (2, 5.0)):
        clock = Clock(stages=StageSchedule(2))
        first = clock.launch(0.0, 0.0, work)
        for _ in range(others):
            clock.launch(0.0, 0.0, work)
        clock.wait(clock.launch(0.0, 0.0, work, after=first))
        assert clock.host == done_s
