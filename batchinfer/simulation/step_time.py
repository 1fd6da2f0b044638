"""How long a step takes: its operators' rooflines at the share of them that this machine reaches, and the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on a machine. The efficiencies say which share of the roofline steps reach that mostly read
    prompts, and that mostly decode; 1 and no time of the host give the least that a step can take."""

    peaks: Peaks
    prefill_efficiency: float = 1.0  # 0…1
    decode_efficiency: float = 1.0  # 0…1
    host_step_s: float = 0.0  # of a step, however many rows it has
    host_row_s: float = 0.0  # of a row of a step

    def device_s(self, shape: StepShape, cost: ModelCost) -> float:
        """Inside the model and the sampler."""
        reads = shape.tokens > 2 * shape.sampled
        efficiency = self.prefill_efficiency if reads else self.decode_efficiency
        return roofline_seconds(cost.step(shape), self.peaks) / efficiency

    def host_s(self, rows: int) -> float:
        """Scheduling a step and taking its tokens."""
        return self.host_step_s + rows * self.host_row_s


class MeasuredStep(NamedTuple):
    """A step of an earlier run."""

    reads: bool  # mostly prompts
    rows: int
    roofline_s: float
    model_s: float
    host_s: float


FEWEST = 20  # steps of a kind, from which an efficiency is taken: the first ones compile, and warm caches


def measured_step_time(peaks: Peaks, steps: Iterable[MeasuredStep]) -> StepTime | None:
    """What earlier steps on the same machine in the same arithmetic took; None where they are too few.

    Efficiencies are ratios of sums, so that long steps count for more. Host times are a line fitted to steps by
    least squares, with no part below zero.
    """
    seen = list(steps)
    kinds = [[step for step in seen if step.reads == reads] for reads in (True, False)]
    found = [_efficiency(kind) for kind in kinds]
    if all(one is None for one in found):
        return None
    prefill, decode = (one if one is not None else next(f for f in found if f is not None) for one in found)
    return StepTime(peaks, prefill, decode, *_line(seen))


def _efficiency(steps: list[MeasuredStep]) -> float | None:
    measured = sum(step.model_s for step in steps)
    if len(steps) < FEWEST or measured <= 0:
        return None
    return min(1.0, sum(step.roofline_s for step in steps) / measured)


def _line(steps: list[MeasuredStep]) -> tuple[float, float]:
    rows = np.array([step.rows for step in steps], float)
    host = np.array([step.host_s for step in steps])
    spread = rows - rows.mean()
    slope = float(spread @ host / (spread @ spread)) if spread.any() else 0.0
    if slope <= 0:
        return max(0.0, float(host.mean())), 0.0
    start = float(host.mean() - slope * rows.mean())
    return (start, slope) if start > 0 else (0.0, float(host.sum() / rows.sum()))
