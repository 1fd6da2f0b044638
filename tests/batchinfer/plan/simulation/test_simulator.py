"""A simulated run takes the same steps as a real one, and the time of the given clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.samples import StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.graph_sizes import MIN_CONTEXT_BOUND, batch_sizes
from batchinfer.plan.simulation import simulator
from batchinfer.plan.simulation.clock import Captures, LaunchPredictor
from batchinfer.plan.simulation.extrapolation import SimulatedPart, extrapolate
from batchinfer.plan.simulation.simulator import (
    SimulatedEngine,
    SimulatedTotals,
    block_bytes,
    simulate,
    simulated_steps,
)
from batchinfer.plan.simulation.step_parts import PARTS, TimedStep
from batchinfer.plan.simulation.step_time import (
    FEWEST,
    MeasuredStep,
    StepTime,
    host_line,
    measured_step_time,
    shape_of,
)
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, step_total
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner, with_graphs
from tests.batchinfer.engine.simulation import LLAMA_8B, LLAMA_135M
from tests.batchinfer.engine.small_engine import MAX_LEN, Limits, at_once, drain, make_engine, watcher
from tests.examples import examples

PEAKS = Peaks(1e12, 1e11)
MEASURED = ("_s", "graph_bytes")  # fields that only a device can measure
COUNTS = [field.name for field in fields(StepSample) if not field.name.endswith(MEASURED)]


def chunks(rows: int, start: int, length: int = 1) -> tuple[list[int], list[int]]:
    """Return the starts and lengths of a step's chunks."""
    return [start] * rows, [length] * rows


def test_steps_that_read_prompts_are_replayed_in_pieces_up_to_a_size():
    launching = LaunchPredictor(Captures(rows=8, longest=5000, tokens=64))
    assert launching.mode(*chunks(4, 0, 16), decodes=False, shares=False) == "piecewise_graph"
    assert launching.mode(*chunks(4, 0, 17), decodes=False, shares=False) == "eager"
    copies = launching.mode(*chunks(4, 9), decodes=False, shares=True)
    assert copies == "piecewise_graph"


def test_decode_steps_are_replayed_as_one_graph_up_to_a_size():
    launching = LaunchPredictor(Captures(rows=8, longest=500, tokens=0))  # no step is captured in pieces
    found = [launching.mode(*chunks(*step), True, False) for step in ((8, 9), (9, 9), (8, 499), (8, 500))]
    assert found == ["full_graph", "eager", "full_graph", "eager"]


def test_kinds_that_the_warm_up_leaves_out_are_captured_when_they_come_for_the_third_time():
    launching = LaunchPredictor(Captures(rows=8, longest=5000, tokens=64))
    kinds = [
        (chunks(3, 9), True),
        (chunks(3, MIN_CONTEXT_BOUND), False),
        (chunks(5, MIN_CONTEXT_BOUND), False),
    ]
    found = [[launching.mode(*step, True, shares) for step, shares in kinds] for _ in range(4)]
    assert found == [["piecewise_graph"] * 3] * 2 + [["full_graph"] * 3] * 2
    three_take_the_graph_of_four = launching.mode(*chunks(4, MIN_CONTEXT_BOUND + 7), True, False)
    assert three_take_the_graph_of_four == "full_graph"


def test_without_captures_all_is_launched_by_operators():
    launching = LaunchPredictor(Captures(0, 0, 0))
    assert {launching.mode(*chunks(2, 9), decodes, False) for decodes in (True, False)} == {"eager"}


def run(start: int, each: int, size: int) -> SimulatedTotals:
    """Return a run whose start and end do not depend on `size`."""
    counts = {field.name: start + each * size for field in fields(SimulatedTotals)}
    times = {name: float(counts[name]) for name in ("seconds", "roofline_s")}
    return SimulatedTotals(**(counts | times))  # type: ignore[arg-type]


@given(*(st.integers(*bounds) for bounds in ((0, 1000), (0, 100), (1, 100), (1, 100), (0, 10_000))))
def test_beginning_and_end_are_counted_once(start: int, each: int, few: int, more: int, left: int) -> None:
    parts = [SimulatedPart(size, run(start, each, size)) for size in (few, few + more)]
    found, whole = extrapolate(*parts, few + more + left), run(start, each, few + more + left)
    for field in fields(SimulatedTotals):
        assert getattr(found, field.name) == pytest.approx(getattr(whole, field.name)), field.name


@st.composite
def rows(draw: Any) -> list[Request]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), max_size=12))
    found = []
    for number in range(draw(st.integers(1, 12))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        prompt = shared[: draw(st.integers(0, len(shared)))] + own
        params = SamplingParams(
            max_tokens=draw(st.integers(0, 12)),
            ignore_eos=draw(st.booleans()),
            stop=draw(st.sampled_from([(), (), ("there",)])),
            stop_token_ids=draw(st.sampled_from([(), (), (2,)])),
            frequency_penalty=draw(st.sampled_from([0.0] * 39 + [0.5])),
        )
        found.append(Request(np.random.default_rng(number).bytes(32), np.array(prompt, np.int32), params))
    return found


LIMITS = st.builds(
    Limits,
    budget=st.sampled_from([3, 7, 40]),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    blocks=st.integers(10, 22),
    block_size=st.just(4),
)


def machine(limits: Limits, runner: ModelRunner, time: StepTime, looks_ahead: bool) -> SimulatedEngine:
    config, roots = SchedulerConfig(limits.seqs, limits.budget, limits.caching), ContentRoots(MAX_LEN)
    captures = Captures(0, 0, 0) if looks_ahead else None
    sizes = runner.cost, runner.layout, limits.blocks
    return SimulatedEngine(*sizes, config, roots, time, looks_ahead, captures=captures)


def work_of(params: Sequence[SamplingParams], length: int = 9) -> tuple[list[Request], dict[bytes, int]]:
    """Return requests that share no prefix, and the maximum lengths of their answers."""
    work = [
        Request(bytes([n]) * 32, np.arange(length, dtype=np.int32) + n, own) for n, own in enumerate(params)
    ]
    return work, {request.key: request.params.max_tokens for request in work}


def counts(steps: Sequence[StepSample]) -> list[dict[str, int]]:
    return [{name: getattr(step, name) for name in COUNTS} for step in steps]


@settings(max_examples=examples(26, 80), deadline=None, print_blob=True)
@given(rows(), LIMITS, st.sampled_from([ModelRunner, DeviceRunner, DeviceRunner]), st.integers(1, 4))
def test_simulated_steps_equal_those_of_the_engine(
    work: list[Request], limits: Limits, kind: Any, steps: int
) -> None:
    """Chunks, batches, sharing, preemption, padding with look-ahead, multi-step decoding, FLOPs and bytes."""
    runner = hashing_runner(kind, limits.blocks, limits.block_size)
    repeated = partial(at_once, steps if kind is DeviceRunner else 1)
    own = make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher, repeated=repeated())
    real = drain(own, work)
    outputs = {key: len(answer.tokens.token_ids) for key, answer in real.completions.items()}
    made = machine(limits, runner, StepTime(PEAKS), looks_ahead=kind is DeviceRunner)
    made = replace(made, repeats=True)
    with patch.object(simulator, "_repeated", lambda _: repeated()):
        found = [sample for output in simulated_steps(made, work, outputs) for sample in output.samples]
    event(f"preempted: {any(step.preemptions for step in real.steps)}")
    event(f"shared: {any(step.cached_tokens for step in real.steps)}")
    event(f"steps at once: {max((step.launched_steps for step in real.steps), default=0)}")
    assert counts(found) == counts(real.steps)


@settings(max_examples=examples(8, 20), deadline=None, print_blob=True)
@given(rows(), LIMITS, st.integers(1, 12), st.integers(4, 40))
def test_steps_launch_as_in_the_engine(work: list[Request], limits: Limits, most: int, longest: int) -> None:
    runner = hashing_runner(DeviceRunner, limits.blocks, limits.block_size)
    runner = with_graphs(runner, most, longest, limits.blocks)
    real = drain(make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher), work)
    outputs = {key: len(answer.tokens.token_ids) for key, answer in real.completions.items()}
    made = machine(limits, runner, StepTime(PEAKS), looks_ahead=True)
    made = replace(made, captures=Captures(most, longest, tokens=0))
    found = [output.sample.launch for output in simulated_steps(made, work, outputs) if output.sample]
    pairs = Counter(zip((step.launch for step in real.steps), found, strict=True))
    event(f"launched in both ways: {len(pairs) > 1}")
    # with shared blocks, the simulation assumes that the first two steps of each batch size are not captured
    spared = pairs.pop(("full_graph", "eager"), 0)
    assert set(pairs) <= {("full_graph", "full_graph"), ("eager", "eager")}
    assert spared <= (2 * len(batch_sizes(most)) if limits.caching else 0)
    assert {step.capture_s is None for step in real.steps} <= {False}


def test_rows_of_another_adapter_share_nothing() -> None:
    limits = Limits(seqs=1, budget=40, blocks=40, block_size=4)
    runner = hashing_runner(ModelRunner, limits.blocks, limits.block_size)
    made, prompt = machine(limits, runner, StepTime(PEAKS), looks_ahead=False), np.arange(17, dtype=np.int32)

    def cached(*adapters: str) -> int:
        params = [SamplingParams(max_tokens=2, ignore_eos=True, adapter=name) for name in adapters]
        work = [Request(bytes([at]) * 32, prompt, own) for at, own in enumerate(params)]
        outputs = dict.fromkeys((request.key for request in work), 2)
        steps = [output.sample for output in simulated_steps(made, work, outputs) if output.sample]
        return sum(step.cached_tokens for step in steps)

    assert cached("one", "one") == cached("", "") > cached("one", "two") == 0


def test_time_is_the_devices_and_the_hosts() -> None:
    limits = Limits(budget=40, seqs=4, blocks=40, block_size=4)
    runner = hashing_runner(ModelRunner, limits.blocks, limits.block_size)
    work, outputs = work_of([SamplingParams(max_tokens=6, ignore_eos=True)] * 8)
    time = StepTime(PEAKS, 0.5, 0.25, host_step_s=0.01, host_row_s=0.001)
    made = machine(limits, runner, time, looks_ahead=False)
    steps = [output.sample for output in simulated_steps(made, work, outputs) if output.sample]
    total = simulate(made, work, outputs)
    assert len(steps) == total.steps == 12
    expected = 0.0
    for step in steps:
        expected += step.roofline_s / (0.5 if step.prefill_tokens else 0.25) + 0.01 + 0.004
    assert total.seconds == pytest.approx(expected)
    assert total.sampled_tokens == 48
    assert total.roofline_s == pytest.approx(sum(step.roofline_s or 0.0 for step in steps))
    # with look-ahead, the device hides the host time except in the first and the last step
    ahead = simulate(replace(made, looks_ahead=True), work, outputs)
    device = expected - 12 * 0.014
    assert ahead.seconds < total.seconds
    assert ahead.seconds >= max(device, 12 * 0.014)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_steps_launched_together_take_the_host_time_once(penalty: float) -> None:
    """The device takes the time of all steps. A row with a penalty makes all rows run single steps."""
    limits = Limits(budget=40, seqs=4, blocks=80, block_size=4)
    runner = hashing_runner(DeviceRunner, limits.blocks, limits.block_size)
    params = [SamplingParams(max_tokens=41, ignore_eos=True)] * 3
    params.append(replace(params[0], presence_penalty=penalty))
    work, outputs = work_of(params)
    time = StepTime(PEAKS, host_step_s=1.0, host_row_s=0.1, host_repeat_s=0.01, host_repeat_row_s=0.001)
    made = replace(machine(limits, runner, time, looks_ahead=True), repeats=True)
    with patch.object(simulator, "_repeated", lambda _: at_once(4)):
        steps = [sample for one in simulated_steps(made, work, outputs) for sample in one.samples]
        took = simulate(made, work, outputs).seconds
        device_alone_s = simulate(replace(made, time=StepTime(PEAKS)), work, outputs).seconds
    device_s = sum(step.roofline_s or 0.0 for step in steps)
    assert device_alone_s == pytest.approx(device_s), "each step takes its own device time"
    launches = 1 + (40 if penalty else 10)
    further_s = 0.0 if penalty else 3 * (0.01 + 4 * 0.001)
    assert sum(1 / step.launched_steps for step in steps) == pytest.approx(launches)
    # the device is faster and waits for the host, except in the last launch
    last_s = device_s / len(steps) * steps[-1].launched_steps
    assert took == pytest.approx(launches * 1.4 + (launches - 1) * further_s + last_s, rel=1e-6)


def measured(expected: StepTime, count: int, took: StepTime, seed: int = 5) -> list[MeasuredStep]:
    """Return steps of a real model's cost that took the time of `took`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows_of_step = int(rng.integers(1, 256))
        tokens = rows_of_step if rng.random() < 0.7 else rows_of_step + int(rng.integers(256, 2048))
        shape = StepShape(tokens, rows_of_step, 30 * tokens * 50, 30 * tokens * 50)
        seconds = took.device_s(shape, LLAMA_135M, rows_of_step)
        step = TimedStep(LLAMA_135M, shape, rows_of_step, seconds)
        found.append(MeasuredStep(step, took.host_s(rows_of_step)))
    return found


@pytest.mark.parametrize("parts", [None, dict.fromkeys(PARTS, 1.5) | {"layers": 1e-4, "rows": 1e-5}])
def test_step_times_are_fitted_to_measured_steps(parts: dict[str, float] | None) -> None:
    expected = StepTime(PEAKS, parts=parts)
    wanted = replace(
        expected, prefill_efficiency=0.8, decode_efficiency=0.4, host_step_s=0.002, host_row_s=3e-5
    )
    steps = measured(expected, 400, wanted)
    found = measured_step_time(expected, steps)
    for name in ("prefill_efficiency", "decode_efficiency", "host_step_s", "host_row_s"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name
    assert found.parts == parts
    assert measured_step_time(expected, steps[: FEWEST // 2]) is None
    decodes = [one for one in steps if one.step.shape.tokens == one.step.rows]
    only = measured_step_time(expected, decodes)
    assert only.prefill_efficiency == only.decode_efficiency == pytest.approx(0.4)


def test_predicted_times_are_never_negative() -> None:
    """A few long steps of few rows fit a falling line, or one with a negative intercept."""
    rows_of = np.arange(1.0, 60.0)
    for host_s in (1 / rows_of, 1e-5 * rows_of**2):
        found = host_line(rows_of, host_s)
        assert min(found) == 0
        assert max(found) > 0
        assert (found[0] + found[1] * rows_of).sum() == pytest.approx(host_s.sum())


@pytest.mark.parametrize("cost", [LLAMA_135M, LLAMA_8B])
def test_the_shape_of_a_step_is_restored_from_the_report(cost: ModelCost) -> None:
    """Steps of earlier runs are compared by shape."""
    for shape in (
        StepShape(64, 64, 64 * 700 * cost.layers, 64 * 700 * cost.layers),
        StepShape(2048, 3, 3_000_017, 61_440),
    ):
        moved = step_total(cost.step(shape)).bytes
        assert shape_of(cost, shape.tokens, shape.sampled, cost.model_flops(shape), moved) == shape


@pytest.mark.parametrize("seqs", [1, 3])
def test_cache_memory_costs_time_only_at_its_first_use(seqs: int) -> None:
    """Of six rows in sequence only the first uses new blocks. With three at a time, three do."""
    runner = hashing_runner(ModelRunner, 20, 4)
    work, outputs = work_of([SamplingParams(max_tokens=4, ignore_eos=True)] * 6, length=8)
    limits = Limits(budget=40, seqs=seqs, caching=False, blocks=20, block_size=4)
    made = machine(limits, runner, StepTime(PEAKS), looks_ahead=False)
    more = simulate(replace(made, time=StepTime(PEAKS, first_use_s=1e-3)), work, outputs).seconds
    least = simulate(made, work, outputs).seconds
    blocks = seqs * 3  # 8 tokens of the prompt, and 3 of the answer are run
    assert more - least == pytest.approx(blocks * block_bytes(runner.layout, runner.cost) * 1e-3)
