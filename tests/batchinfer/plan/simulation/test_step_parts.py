"""The times of a step's parts are fitted to timed steps, and predict other steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.statistics.least_squares import nonnegative
from batchinfer.plan.simulation.step_parts import (
    PARTS,
    TimedStep,
    fit_step_parts,
    predict_seconds,
    step_parts,
)
from batchinfer.plan.simulation.step_time import HOST_ROW, HOST_STEP, StepTime
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds
from tests.batchinfer.engine.simulation import LLAMA_8B, LLAMA_135M
from tests.examples import examples
from tests.model_costs import llama_cost

PEAKS = Peaks(150e9, 30e9)
NARROW = llama_cost(4, 256, 640, 4, 2, 64, 2_048, 4, 4)
WIDE = llama_cost(3, 768, 2048, 12, 4, 64, 16_000, 4, 4)
TRUTH = {
    "products": 1.1,
    "weights": 1.6,
    "attention": 2.4,
    "kv_cache": 1.2,
    "sampler": 1.3,
    "elementwise": 5.0,
    "layers": 1e-4,
    "rows": 1.2e-5,
}


def shapes(cost: ModelCost) -> list[tuple[StepShape, int]]:
    """Return shapes of prefill, decode and mixed steps, as a calibration runs them."""
    prompts = [
        (StepShape(n * length, n, cost.layers * n * length**2 // 2, cost.layers * n * length), n)
        for n, length in ((1, 32), (1, 512), (4, 128), (1, 1024), (32, 32))
    ]
    decodes = [
        (StepShape(rows, rows, cost.layers * rows * context, cost.layers * rows * context), rows)
        for rows, context in ((1, 32), (1, 1024), (16, 64), (16, 1024), (64, 512), (128, 256), (256, 64))
    ]
    mixed = (StepShape(512, 129, cost.layers * 100_000, cost.layers * 26_000), 129)
    return [*prompts, *decodes, mixed]


def timed(cost: ModelCost) -> list[TimedStep]:
    return [
        TimedStep(cost, shape, rows, predict_seconds(TRUTH, step_parts(cost, shape, rows, PEAKS)))
        for shape, rows in shapes(cost)
    ]


def test_what_parts_take_is_found_again_from_two_models() -> None:
    found = fit_step_parts([*timed(NARROW), *timed(WIDE)], PEAKS)
    assert found == pytest.approx(TRUTH, rel=1e-6)


def test_steps_of_another_model_are_forecast() -> None:
    rng = np.random.default_rng(11)
    steps = [*timed(NARROW), *timed(WIDE)]
    noisy = [step._replace(seconds=step.seconds * rng.normal(1, 0.05)) for step in steps]
    found = fit_step_parts(noisy, PEAKS)
    assert all(value >= 0 for value in found.values())
    real = timed(LLAMA_135M)
    total = sum(predict_seconds(found, step_parts(s.cost, s.shape, s.rows, PEAKS)) for s in real)
    assert total == pytest.approx(sum(step.seconds for step in real), rel=0.1)


def test_steps_that_something_disturbed_hardly_count() -> None:
    steps = [*timed(NARROW), *timed(WIDE)]
    for at, times in ((1, 1.5), (8, 3.0), (11, 1.5), (17, 3.0), (22, 1.5)):
        steps[at] = steps[at]._replace(seconds=steps[at].seconds * times)
    found = fit_step_parts(steps, PEAKS)
    real = timed(LLAMA_135M)
    for step in real:
        assert predict_seconds(found, step_parts(*step[:3], PEAKS)) == pytest.approx(step.seconds, rel=0.15)
    total = sum(predict_seconds(found, step_parts(*step[:3], PEAKS)) for step in real)
    assert total == pytest.approx(sum(step.seconds for step in real), rel=0.05)


@pytest.mark.parametrize("cost", [NARROW, LLAMA_135M, LLAMA_8B])
def test_the_minimum_of_all_parts_is_not_below_the_roofline(cost: ModelCost) -> None:
    for shape, rows in shapes(cost):
        parts = step_parts(cost, shape, rows, PEAKS)
        work = dict.fromkeys(PARTS, 1.0) | {"layers": 0.0, "rows": 0.0}
        assert predict_seconds(work, parts) >= 0.9 * roofline_seconds(cost.step(shape), PEAKS)
        assert min(parts.shares(work)[part] for part in PARTS) > 0


def test_a_measurement_that_lacks_a_part_is_none() -> None:
    whole = {**TRUTH, HOST_STEP: 1e-4, HOST_ROW: 1e-5}
    made = StepTime.calibrated(PEAKS, whole)
    assert made.host_s(10) == pytest.approx(2e-4)
    for name in whole:
        assert StepTime.calibrated(PEAKS, {key: value for key, value in whole.items() if key != name}) is None


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.integers(0, 10_000))
def test_no_other_coefficients_from_zero_on_come_nearer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(12, 5))
    wanted = rng.normal(size=12)
    found = nonnegative(columns, wanted)
    assert (found >= 0).all()
    gradient = columns.T @ (wanted - columns @ found)  # KKT: no change improves the fit
    assert (gradient <= 1e-7).all()
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-7


def test_a_column_that_gains_nothing_leaves_numbers() -> None:
    """A gain may be a rounding error."""
    columns = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    found = nonnegative(columns, np.array([3.0, 3.0, 1e-300]))
    assert np.isfinite(found).all()
    assert columns @ found == pytest.approx([3.0, 3.0, 0.0])
