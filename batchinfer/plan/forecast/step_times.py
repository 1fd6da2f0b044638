"""Chooses the best available step times for a job on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from batchinfer.core.hub import describe_model
from batchinfer.engine.schedule.budget import (
    HOST_REPEAT_ROW_S,
    HOST_REPEAT_S,
    HOST_ROW_S,
    HOST_STEP_S,
    LAUNCH_LAYER_S,
    REPLAY_LAYER_S,
    further_host_s,
)
from batchinfer.job import Job
from batchinfer.plan.setup.setting import Setting
from batchinfer.plan.simulation.step_parts import TimedStep
from batchinfer.plan.simulation.step_time import MeasuredStep, StepTime, measured_step_time, shape_of
from batchinfer.report.tables.earlier_runs import LAUNCHED_STEPS, EarlierSteps
from batchinfer_kernels.cost import ModelCost, Peaks

# Assumed share of a GPU's peaks while no run has measured it: a round number, not a measurement
DECLARED_EFFICIENCY = 0.6
MOST_STEPS = 5_000  # steps of earlier runs that are used; each takes about 0.1 ms to evaluate

# Origin: earlier runs; `doctor --measure`; DECLARED_EFFICIENCY; the roofline; or nothing, because peaks are unknown
Basis = Literal["runs", "measured", "declared", "limit", "unknown"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A predictor of step durations and the origin of its measurements.

    Attributes:
        time: Predicts the seconds of a step.
        basis: Origin of the measurements: "runs" (earlier runs), "measured" (`doctor --measure`), "declared" (an
            assumed share of the peaks), "limit" (the roofline), or "unknown" (no peaks: the seconds are meaningless).
        runs: Number of earlier runs whose steps were used. 0 unless `basis` is "runs".
    """

    time: StepTime
    basis: Basis
    runs: int = 0


def comparable_values(job: Job, setting: Setting) -> dict[str, object]:
    """Return the values, by column of the run table, that a comparable earlier run must have.

    Step times of a run are used for a forecast only if its model, machine and arithmetic are the same.
    """
    return {
        "model": describe_model(job.model.path),
        "hardware": setting.placement.hardware.name,
        "cores": setting.placement.hardware.cores,
        "device": setting.device,
        **setting.facts,
    }


def step_times(setting: Setting, cost: ModelCost, earlier: EarlierSteps | None) -> StepTimes:
    """Return the best available predictor of step durations for a model on this machine.

    Measured steps of earlier runs are used first, then the result of `doctor --measure`, then an assumed share of the
    device's peaks.

    Args:
        setting: The job's device, arithmetic, memory and parallelism.
        cost: FLOPs and bytes of the model's steps.
        earlier: Steps of comparable earlier runs, or None.
    """
    if setting.peaks is None:  # counts are valid; the seconds are not shown
        return StepTimes(StepTime(Peaks(1.0, 1.0)), "unknown")
    expected = _expected(setting, setting.peaks)
    if earlier is None:
        return expected
    found = measured_step_time(expected.time, _measured(earlier, cost))
    return expected if found is None else StepTimes(found, "runs", earlier.runs)


def _expected(setting: Setting, peaks: Peaks) -> StepTimes:
    measured = setting.placement.hardware.step_time(setting.numerics.dtype, setting.numerics.quantization)
    calibrated = None if measured is None else StepTime.calibrated(peaks, measured)
    if calibrated is not None:
        return StepTimes(calibrated, "measured")
    if setting.device == "cpu":
        return StepTimes(StepTime(peaks), "limit")
    declared = StepTime(
        peaks,
        prefill_efficiency=DECLARED_EFFICIENCY,
        decode_efficiency=DECLARED_EFFICIENCY,
        host_step_s=HOST_STEP_S,
        host_row_s=HOST_ROW_S,
        host_repeat_s=HOST_REPEAT_S,
        host_repeat_row_s=HOST_REPEAT_ROW_S,
        launch_layer_s=LAUNCH_LAYER_S,
        replay_layer_s=REPLAY_LAYER_S,
    )
    return StepTimes(declared, "declared")


def _measured(earlier: EarlierSteps, cost: ModelCost) -> Iterator[MeasuredStep]:
    columns = earlier.columns
    tokens = columns["prefill_tokens"] + columns["decode_tokens"] - columns["recomputed_tokens"]
    wall = np.where(np.isfinite(columns["interval_s"]), columns["interval_s"], columns["duration_s"])
    rows = np.maximum(columns["running"], columns["sampled_tokens"])
    for at in np.linspace(0, len(tokens) - 1, min(len(tokens), MOST_STEPS)).astype(int):
        sampled, model_s = int(columns["sampled_tokens"][at]), float(columns["model_s"][at])
        flops, moved = int(columns["flops"][at]), int(columns["bytes"][at])
        shape = shape_of(cost, int(tokens[at]), sampled, flops, moved)
        # The host time of steps launched together is divided among them; remove the share of the further steps
        launched = float(columns[LAUNCHED_STEPS][at])
        host_s = (float(wall[at]) - model_s) * launched - further_host_s(launched - 1, int(rows[at]))
        yield MeasuredStep(TimedStep(cost, shape, int(rows[at]), model_s), max(0.0, host_s))
