"""A simulated run takes the steps of the real one, and the time that its clock is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.engine.device_runner import DeviceRunner
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.scheduler import SchedulerConfig
from batchinfer.request import Request, SamplingParams, StepSample
from batchinfer.simulation.simulator import SimulatedEngine, simulate, simulated_steps
from batchinfer.simulation.step_time import FEWEST, MeasuredStep, StepTime, measured_step_time
from batchinfer_kernels.cost import Peaks, roofline_seconds
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner
from tests.batchinfer.engine.small_engine import MAX_LEN, Limits, drain, make_engine, watcher

PEAKS = Peaks(1e12, 1e11)
TIMES = {"started_s", "duration_s", "model_s", "roofline_s", "mask_s", "compile_s"}
COUNTS = [field.name for field in fields(StepSample) if field.name not in TIMES]


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
    return SimulatedEngine(
        runner.cost,
        runner.layout,
        limits.blocks,
        SchedulerConfig(limits.seqs, limits.budget, limits.caching),
        MAX_LEN,
        time,
        looks_ahead,
    )


def counts(steps: Sequence[StepSample]) -> list[dict[str, int]]:
    return [{name: getattr(step, name) for name in COUNTS} for step in steps]


@settings(max_examples=80, deadline=None, print_blob=True)
@given(rows(), LIMITS, st.sampled_from([ModelRunner, DeviceRunner]))
def test_each_step_is_that_of_the_real_engine(work: list[Request], limits: Limits, kind: Any) -> None:
    """Chunks, batches, sharing, preemption, padding of steps that looked ahead, flops and bytes."""
    runner = hashing_runner(kind, limits.blocks, limits.block_size)
    real = drain(make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher), work)
    outputs = {key: len(answer.token_ids) for key, answer in real.completions.items()}
    made = machine(limits, runner, StepTime(PEAKS), looks_ahead=kind is DeviceRunner)
    found = [output.sample for output in simulated_steps(made, work, outputs) if output.sample]
    event(f"preempted: {any(step.preemptions for step in real.steps)}")
    event(f"shared: {any(step.cached_tokens for step in real.steps)}")
    assert counts(found) == counts(real.steps)


def test_time_is_the_devices_and_the_hosts() -> None:
    limits = Limits(budget=40, seqs=4, blocks=40, block_size=4)
    runner = hashing_runner(ModelRunner, limits.blocks, limits.block_size)
    prompts = [np.arange(9, dtype=np.int32) + n for n in range(8)]
    work = [
        Request(bytes([n]) * 32, prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]
    outputs = dict.fromkeys((request.key for request in work), 6)
    time = StepTime(PEAKS, 0.5, 0.25, host_step_s=0.01, host_row_s=0.001)
    made = machine(limits, runner, time, looks_ahead=False)
    steps = [output.sample for output in simulated_steps(made, work, outputs) if output.sample]
    total = simulate(made, work, outputs)
    assert len(steps) == total.steps == 12
    expected = 0.0
    for step in steps:
        assert step.roofline_s is not None
        expected += step.roofline_s / (0.5 if step.prefill_tokens else 0.25) + 0.01 + 0.004
    assert total.seconds == pytest.approx(expected)
    assert total.sampled_tokens == 48
    assert total.roofline_s == pytest.approx(sum(step.roofline_s or 0.0 for step in steps))
    # a device that is launched ahead hides the host, but for the first and the last step
    ahead = simulate(replace(made, looks_ahead=True), work, outputs)
    device = expected - 12 * 0.014
    assert ahead.seconds < total.seconds
    assert ahead.seconds >= max(device, 12 * 0.014)


def test_step_times_are_found_again_from_what_steps_took() -> None:
    rng = np.random.default_rng(5)
    wanted = StepTime(PEAKS, 0.8, 0.4, 0.002, 0.00003)
    steps = []
    for _ in range(400):
        reads, rows_of_step, roofline = rng.random() < 0.3, int(rng.integers(1, 256)), rng.uniform(0.01, 0.3)
        took = roofline / (wanted.prefill_efficiency if reads else wanted.decode_efficiency)
        steps.append(MeasuredStep(reads, rows_of_step, roofline, took, wanted.host_s(rows_of_step)))
    found = measured_step_time(PEAKS, steps)
    assert found is not None
    for name in ("prefill_efficiency", "decode_efficiency", "host_step_s", "host_row_s"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name
    assert measured_step_time(PEAKS, steps[: FEWEST // 2]) is None
    decodes = [step for step in steps if not step.reads]
    only = measured_step_time(PEAKS, decodes)
    assert only is not None
    assert only.prefill_efficiency == only.decode_efficiency == pytest.approx(0.4)


def test_no_time_is_below_zero_however_steps_scatter() -> None:
    """A few long steps of few rows make a line that falls, or that begins below zero."""
    falling = [MeasuredStep(False, rows, 0.1, 0.2, 1 / rows) for rows in range(1, 60)]
    steep = [MeasuredStep(False, rows, 0.1, 0.2, 1e-5 * rows**2) for rows in range(1, 60)]
    for steps in (falling, steep):
        found = measured_step_time(PEAKS, steps)
        assert found is not None
        assert min(found.host_step_s, found.host_row_s) == 0
        assert max(found.host_step_s, found.host_row_s) > 0
        total = sum(found.host_s(step.rows) for step in steps)
        assert total == pytest.approx(sum(step.host_s for step in steps))


def test_a_step_takes_its_roofline_at_the_least() -> None:
    runner = hashing_runner(ModelRunner, 40, 4)
    shape = runner.step_shape([], 0)
    assert StepTime(PEAKS).device_s(shape, runner.cost) == roofline_seconds(runner.cost.step(shape), PEAKS)
