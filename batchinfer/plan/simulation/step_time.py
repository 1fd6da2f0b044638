"""How long a step takes: what its work takes on this machine, and the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.samples import LaunchMode
from batchinfer.plan.simulation.step_parts import PARTS, TimedStep, predicted, step_parts
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds, step_total

HOST_STEP, HOST_ROW, FIRST_USE = "host_step_s", "host_row_s", "first_use_s"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on a machine. By default the least that the peaks allow, and no time of the host.

    `parts`: what parts of a step take here, as `step_parts.fitted` finds it; None: their rooflines. The efficiencies
    say which share of that speed steps reach that mostly read prompts, and that mostly decode.
    """

    peaks: Peaks
    prefill_efficiency: float = 1.0
    decode_efficiency: float = 1.0
    host_step_s: float = 0.0  # of a step, however many rows it has
    host_row_s: float = 0.0  # of a row of a step
    launch_layer_s: float = 0.0  # of a layer of a step that is launched an operator at a time
    replay_layer_s: float = 0.0  # of a layer of a step that is replayed in pieces
    # Of a byte of the KV cache that is used for the first time: only then the kernel finds memory for it, and clears it
    first_use_s: float = 0.0
    parts: Mapping[str, float] | None = None
    # Of each further step that a GPU's host launches at once with one, and of a row of it
    host_repeat_s: float = 0.0
    host_repeat_row_s: float = 0.0

    @classmethod
    def calibrated(cls, peaks: Peaks, times: Mapping[str, float]) -> StepTime | None:
        """Return the time by what `doctor --measure` found; None where that lacks a part, as another version's may."""
        if not {*PARTS, HOST_STEP, HOST_ROW} <= set(times):
            return None
        host = {"host_step_s": times[HOST_STEP], "host_row_s": times[HOST_ROW]}
        return cls(peaks, **host, first_use_s=times.get(FIRST_USE, 0.0), parts=times)

    def device_s(self, shape: StepShape, cost: ModelCost, rows: int = 0) -> float:
        """Return the seconds of a step of `rows` rows inside the model and the sampler."""
        efficiency = self.prefill_efficiency if _reads(shape) else self.decode_efficiency
        if self.parts is None:
            return roofline_seconds(cost.step(shape), self.peaks) / efficiency
        return predicted(self.parts, step_parts(cost, shape, rows, self.peaks)) / efficiency

    def host_s(self, rows: int, steps: int = 1) -> float:
        """Return the seconds for scheduling a step of `rows` rows and taking its tokens; on a GPU for replaying its
        graph, too. `steps`: that are launched at once."""
        further = (steps - 1) * (self.host_repeat_s + rows * self.host_repeat_row_s)
        return self.host_step_s + rows * self.host_row_s + further

    def launch_s(self, layers: int, mode: LaunchMode | None) -> float:
        """Return the seconds for launching layers one after the other; 0 where the step is one graph."""
        layer_s = {"piecewise_graph": self.replay_layer_s, "eager": self.launch_layer_s}
        return layers * (layer_s.get(mode, 0.0) if mode else 0.0)


def _reads(shape: StepShape) -> bool:
    """Whether it mostly reads prompts."""
    return shape.tokens > 2 * shape.sampled


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of an earlier run. `rows` had tokens in it."""

    step: TimedStep
    host_s: float


FEWEST = 20  # steps of a kind, from which an efficiency is taken: the first ones compile, and warm caches


def shape_of(cost: ModelCost, tokens: int, sampled: int, flops: int, moved: int) -> StepShape:
    """The shape of a step of which only its tokens, FLOPs (`model_flops`) and bytes were kept. Attention's part of
    these is what the rest of the model leaves."""
    bare = StepShape(tokens, sampled, 0, 0)
    read = sum(operator.kv_token.bytes for operator in cost.operators)
    moved -= step_total(cost.step(bare)).bytes
    pairs = max(0, flops - cost.model_flops(bare)) // max(1, cost.pair_flops)
    rest = moved - sum(operator.pair.bytes for operator in cost.operators) * pairs
    return StepShape(tokens, sampled, pairs, max(0, rest) // max(1, read))


def measured_step_time(expected: StepTime, steps: Iterable[MeasuredStep]) -> StepTime | None:
    """Return the step time that earlier steps on the same machine in the same arithmetic took, from what was expected
    of them; None where they are too few.

    Efficiencies are ratios of sums, so that long steps count for more. A kind of which there are too few has the other
    one's.
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
        first_use_s=0.0,  # the efficiencies have it in them
    )


def _efficiency(expected: StepTime, steps: list[MeasuredStep]) -> float | None:
    measured = sum(one.step.seconds for one in steps)
    if len(steps) < FEWEST or measured <= 0:
        return None
    return sum(expected.device_s(one.step.shape, one.step.cost, one.step.rows) for one in steps) / measured


def host_line(rows: NDArray[np.float64], host_s: NDArray[np.float64]) -> tuple[float, float]:
    """Seconds of a step, and of each of its rows, on the host: a line by least squares with no part below zero."""
    spread = rows - rows.mean()
    slope = float(spread @ host_s / (spread @ spread)) if spread.any() else 0.0
    if slope <= 0:
        return max(0.0, float(host_s.mean())), 0.0
    start = float(host_s.mean() - slope * rows.mean())
    return (start, slope) if start > 0 else (0.0, float(host_s.sum() / rows.sum()))
