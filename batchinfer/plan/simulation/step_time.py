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
    """Seconds of a step on a machine. The default is the roofline without host overhead.

    `parts` has the coefficients from `step_parts.fit_step_parts`, or None for the roofline. The efficiencies are
    the shares of that speed that steps reach if they mostly prefill or mostly decode.
    """

    peaks: Peaks
    prefill_efficiency: float = 1.0
    decode_efficiency: float = 1.0
    host_step_s: float = 0.0  # per step
    host_row_s: float = 0.0  # per row of a step
    launch_layer_s: float = 0.0  # per layer, if operators are launched one by one
    replay_layer_s: float = 0.0  # per layer, if the step is replayed piecewise
    # Per byte of the KV cache at its first use, when the operating system provides and clears the memory
    first_use_s: float = 0.0
    parts: Mapping[str, float] | None = None
    # Per further step of multi-step decoding, and per row of such a step
    host_repeat_s: float = 0.0
    host_repeat_row_s: float = 0.0

    @classmethod
    def calibrated(cls, peaks: Peaks, times: Mapping[str, float]) -> StepTime | None:
        """Return the step time from the results of `doctor --measure`, or None if a part is missing."""
        if not {*PARTS, HOST_STEP, HOST_ROW} <= set(times):
            return None
        host = {"host_step_s": times[HOST_STEP], "host_row_s": times[HOST_ROW]}
        return cls(peaks, **host, first_use_s=times.get(FIRST_USE, 0.0), parts=times)

    def device_s(self, shape: StepShape, cost: ModelCost, rows: int = 0) -> float:
        """Return the seconds of a step of `rows` rows in the model and the sampler."""
        efficiency = self.prefill_efficiency if _reads(shape) else self.decode_efficiency
        if self.parts is None:
            return roofline_seconds(cost.step(shape), self.peaks) / efficiency
        return predict_seconds(self.parts, step_parts(cost, shape, rows, self.peaks)) / efficiency

    def host_s(self, rows: int, steps: int = 1) -> float:
        """Return the host's seconds for a step of `rows` rows: scheduling, replaying a graph, and reading tokens.

        The host launches `steps` steps together.
        """
        further = (steps - 1) * (self.host_repeat_s + rows * self.host_repeat_row_s)
        return self.host_step_s + rows * self.host_row_s + further

    def launch_s(self, layers: int, mode: LaunchMode | None) -> float:
        """Return the seconds to launch layers one after another. 0 if the step is one graph."""
        layer_s = {"piecewise_graph": self.replay_layer_s, "eager": self.launch_layer_s}
        return layers * (layer_s.get(mode, 0.0) if mode else 0.0)


def _reads(shape: StepShape) -> bool:
    """Return True if the step mostly prefills."""
    return shape.tokens > 2 * shape.sampled


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of an earlier run, with the seconds of the host."""

    step: TimedStep
    host_s: float


FEWEST = 20  # least steps of a kind for an efficiency; the first ones compile and warm caches


def shape_of(cost: ModelCost, tokens: int, sampled: int, flops: int, moved: int) -> StepShape:
    """Reconstruct the shape of a step from its tokens, FLOPs (`model_flops`) and bytes.

    Attention accounts for the FLOPs and bytes that the rest of the model does not need.
    """
    bare = StepShape(tokens, sampled, 0, 0)
    read = sum(operator.kv_token.bytes for operator in cost.operators)
    moved -= step_total(cost.step(bare)).bytes
    pairs = max(0, flops - cost.model_flops(bare)) // max(1, cost.pair_flops)
    rest = moved - sum(operator.pair.bytes for operator in cost.operators) * pairs
    return StepShape(tokens, sampled, pairs, max(0, rest) // max(1, read))


def measured_step_time(expected: StepTime, steps: Iterable[MeasuredStep]) -> StepTime | None:
    """Return the step time measured in earlier steps, relative to the expected one, or None with too few steps.

    The steps must be of the same machine and arithmetic. Efficiencies are ratios of sums, so long steps count more.
    A kind of step with too few measurements gets the efficiency of the other kind.
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
    return sum(expected.device_s(one.step.shape, one.step.cost, one.step.rows) for one in steps) / measured


def host_line(rows: NDArray[np.float64], host_s: NDArray[np.float64]) -> tuple[float, float]:
    """Return the host's seconds per step and per row, by a least-squares line without negative coefficients."""
    spread = rows - rows.mean()
    slope = float(spread @ host_s / (spread @ spread)) if spread.any() else 0.0
    if slope <= 0:
        return max(0.0, float(host_s.mean())), 0.0
    start = float(host_s.mean() - slope * rows.mean())
    return (start, slope) if start > 0 else (0.0, float(host_s.sum() / rows.sum()))
