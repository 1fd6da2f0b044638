"""Predicts a step's duration: device time plus host overhead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.samples import LaunchMode
from batchinfer.plan.simulation.step_parts import PARTS, TimedStep, predict_seconds, step_parts
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds, step_total

HOST_STEP, HOST_ROW, FIRST_USE = "host_step_s", "host_row_s", "first_use_s"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicts the duration of a step on a machine: device time plus host overhead.

    The defaults give the roofline time without host overhead.

    Attributes:
        peaks: Peak FLOP/s and bandwidth.
        prefill_efficiency: Share of the predicted speed that steps reach if they mostly prefill.
        decode_efficiency: Share of the predicted speed that steps reach if they mostly decode.
        host_step_s: Host seconds per step.
        host_row_s: Host seconds per row of a step.
        launch_layer_s: Host seconds per layer, if operators are launched one by one.
        replay_layer_s: Host seconds per layer, if the parts between two layers' attention are CUDA graphs.
        first_use_s: Seconds per byte of the KV cache at its first use, when the operating system clears the memory.
        parts: Coefficients from `fit_step_parts`, which predict the device time. None: the roofline predicts it.
        host_repeat_s: Host seconds per further step of multi-step decoding.
        host_repeat_row_s: Host seconds per row of such a further step.
    """

    peaks: Peaks
    prefill_efficiency: float = 1.0
    decode_efficiency: float = 1.0
    host_step_s: float = 0.0
    host_row_s: float = 0.0
    launch_layer_s: float = 0.0
    replay_layer_s: float = 0.0
    first_use_s: float = 0.0
    parts: Mapping[str, float] | None = None
    host_repeat_s: float = 0.0
    host_repeat_row_s: float = 0.0

    @classmethod
    def calibrated(cls, peaks: Peaks, times: Mapping[str, float]) -> StepTime | None:
        """Create a predictor from the times that `doctor --measure` measured. Returns None if a needed time is missing.

        Args:
            peaks: Peak FLOP/s and bandwidth.
            times: The measured values, by the names in PARTS, HOST_STEP, HOST_ROW and FIRST_USE.
        """
        if not {*PARTS, HOST_STEP, HOST_ROW} <= set(times):
            return None
        host = {"host_step_s": times[HOST_STEP], "host_row_s": times[HOST_ROW]}
        return cls(peaks, **host, first_use_s=times.get(FIRST_USE, 0.0), parts=times)

    def device_s(self, shape: StepShape, cost: ModelCost, rows: int = 0) -> float:
        """Return the predicted seconds that a step takes on the device, in the model and the sampler.

        Args:
            shape: Tokens and attention of the step.
            cost: FLOPs and bytes of the model's steps.
            rows: Rows of the step.
        """
        efficiency = self.prefill_efficiency if _reads(shape) else self.decode_efficiency
        if self.parts is None:
            return roofline_seconds(cost.step(shape), self.peaks) / efficiency
        return predict_seconds(self.parts, step_parts(cost, shape, rows, self.peaks)) / efficiency

    def host_s(self, rows: int, steps: int = 1) -> float:
        """Return the seconds that the host takes to schedule steps, replay their CUDA graphs and read their tokens.

        Args:
            rows: Rows of each step.
            steps: Number of steps that the host launches together.
        """
        further = (steps - 1) * (self.host_repeat_s + rows * self.host_repeat_row_s)
        return self.host_step_s + rows * self.host_row_s + further

    def launch_s(self, layers: int, mode: LaunchMode | None) -> float:
        """Return the seconds that the host takes to launch the layers of a step.

        0 if the step is one CUDA graph, or on a CPU.

        Args:
            layers: Number of layers.
            mode: How the step is launched. None on a CPU.
        """
        layer_s = {"piecewise_graph": self.replay_layer_s, "eager": self.launch_layer_s}
        return layers * (layer_s.get(mode, 0.0) if mode else 0.0)


def _reads(shape: StepShape) -> bool:
    return shape.tokens > 2 * shape.sampled


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of an earlier run.

    Attributes:
        step: The step and its measured device time.
        host_s: Measured seconds of the host.
    """

    step: TimedStep
    host_s: float


FEWEST = (
    20  # minimum number of prefill or decode steps for an efficiency; the first steps compile and warm caches
)


def shape_of(cost: ModelCost, tokens: int, sampled: int, flops: int, moved: int) -> StepShape:
    """Reconstruct the shape of a measured step from its counts.

    The FLOPs and bytes that the other operators do not account for are attributed to attention.

    Args:
        cost: FLOPs and bytes of the model's steps.
        tokens: Number of tokens of the step.
        sampled: Number of tokens that the step sampled.
        flops: FLOPs of the step (`model_flops`).
        moved: Bytes that the step read and wrote.
    """
    bare = StepShape(tokens, sampled, 0, 0)
    read = sum(operator.kv_token.bytes for operator in cost.operators)
    moved -= step_total(cost.step(bare)).bytes
    pairs = max(0, flops - cost.model_flops(bare)) // max(1, cost.pair_flops)
    rest = moved - sum(operator.pair.bytes for operator in cost.operators) * pairs
    return StepShape(tokens, sampled, pairs, max(0, rest) // max(1, read))


def measured_step_time(expected: StepTime, steps: Iterable[MeasuredStep]) -> StepTime | None:
    """Fit a predictor of step durations to the steps of earlier runs. Returns None if there are too few steps.

    The steps must have run on the same machine and in the same arithmetic. If only prefill or only decode steps were
    measured, both kinds get the same efficiency.

    Args:
        expected: The predictor without measurements. Efficiencies are relative to it.
        steps: The measured steps.
    """
    seen = list(steps)
    kinds = [[one for one in seen if _reads(one.step.shape) == reads] for reads in (True, False)]
    found = [_efficiency(expected, kind) for kind in kinds]
    if all(one is None for one in found):
        return None
    prefill, decode = (one if one is not None else next(f for f in found if f is not None) for one in found)
    host_step_s, host_row_s = host_line(
        np.array([one.step.rows for one in seen], float), np.array([one.host_s for one in seen])
    )
    return replace(
        expected,
        prefill_efficiency=prefill,
        decode_efficiency=decode,
        host_step_s=host_step_s,
        host_row_s=host_row_s,
        first_use_s=0.0,  # included in the efficiencies
    )


def _efficiency(expected: StepTime, steps: list[MeasuredStep]) -> float | None:
    measured = sum(one.step.seconds for one in steps)
    if len(steps) < FEWEST or measured <= 0:
        return None
    # A ratio of sums, which gives long steps more weight
    return sum(expected.device_s(one.step.shape, one.step.cost, one.step.rows) for one in steps) / measured


def host_line(rows: NDArray[np.float64], host_s: NDArray[np.float64]) -> tuple[float, float]:
    """Fit the host's seconds per step and per row to measured steps, by least squares. Neither is negative.

    Args:
        rows: Number of rows of each step.
        host_s: Host seconds of each step.

    Returns:
        The seconds per step, and the seconds per row.
    """
    spread = rows - rows.mean()
    slope = float(spread @ host_s / (spread @ spread)) if spread.any() else 0.0
    if slope <= 0:
        return max(0.0, float(host_s.mean())), 0.0
    start = float(host_s.mean() - slope * rows.mean())
    return (start, slope) if start > 0 else (0.0, float(host_s.sum() / rows.sum()))
