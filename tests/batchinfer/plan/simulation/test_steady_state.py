"""Simulates how busy the host keeps an H100, with measured host times and measured peaks of the device.

    python -m tests.batchinfer.plan.simulation.test_steady_state [MODEL PROMPT OUTPUT ROWS]

A decode step of 256 rows takes the host 0.9 ms (tests/batchinfer/engine/host_work.py), and as long again to replay
its graph. A layer of another step takes 1.1 ms, or `REPLAY_LAYER_S` if all of it except attention is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.schedule import scheduler
from batchinfer.engine.schedule.batched_admission import AdmissionCosts, BatchedAdmission
from batchinfer.engine.schedule.budget import (
    HOST_ROW_S,
    HOST_STEP_S,
    LAUNCH_LAYER_S,
    REPLAY_LAYER_S,
    admission_costs,
    captured_tokens,
)
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.spec.spec import CacheSpec
from batchinfer.plan.simulation import clock
from batchinfer.plan.simulation.clock import Captures
from batchinfer.plan.simulation.simulator import SimulatedEngine, SimulatedTotals, simulate
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, Peaks
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.model_costs import llama_cost

LLAMA_1B = llama_cost(16, 2048, 8192, 32, 8, 64, 128_256, 2, 2)
MODELS = {"8B": LLAMA_8B, "1B": LLAMA_1B}
H100, EFFICIENCY = Peaks(760e12, 3.0e12), 0.85
MEMORY = 55 << 30  # bytes of the KV cache
SEQS, BUDGET = 256, 8192
SIZES = (2, 4, 8, 16, 32, 48)  # rows admitted together, without admission by cost


class Counted(BatchedAdmission):
    """Admits rows in groups of a fixed size, or smaller groups whose prompts fill a step."""

    def __init__(self, places: int, costs: AdmissionCosts | None) -> None:
        super().__init__(costs)
        self._size = places

    def should_wait(
        self, running: int, waiting: int, cached: int, budget: int, prompt_tokens: Callable[[int], int]
    ) -> bool:
        return running > 0 and self.ended < min(self._size, waiting) and prompt_tokens(self.ended) < budget


def machine(
    cost: ModelCost, costs: AdmissionCosts | None, pieces: bool = True, seqs: int = SEQS
) -> SimulatedEngine:
    layout = one_group([CacheSpec(1, 64)] * cost.layers, 16)
    host = (HOST_STEP_S, HOST_ROW_S, LAUNCH_LAYER_S, REPLAY_LAYER_S)
    time = StepTime(H100, EFFICIENCY, EFFICIENCY, *host)
    captures = Captures(seqs, 100_000, captured_tokens(cost, H100, BUDGET) if pieces else 0)
    blocks = MEMORY // (16 * cost.kv_bytes(1))
    limits = SchedulerConfig(seqs, BUDGET, admission_costs=costs)
    return SimulatedEngine(
        cost, layout, blocks, limits, ContentRoots(100_000), time, looks_ahead=True, captures=captures
    )


def run(engine: SimulatedEngine, prompt: int, output: int, rows: int) -> SimulatedTotals:
    """Run rows whose answer lengths are random around `output` and not known beforehand."""
    lengths = np.minimum(np.random.default_rng(1).geometric(1 / output, rows), 8 * output)
    params = SamplingParams(max_tokens=8 * output)
    requests = [Request(i.to_bytes(32, "big"), np.full(prompt, i, np.int32), params) for i in range(rows)]
    outputs = {request.key: int(length) for request, length in zip(requests, lengths, strict=True)}
    with patch.object(clock, "CAPTURE_AT_USE", 1):  # as later in a job: each kind of step has its graph
        return simulate(engine, requests, outputs)


def shares(name: str, prompt: int, output: int, rows: int, pieces: bool = True) -> tuple[float, float]:
    """Return the device's share of the run's time: with immediate admission, and with admission by cost."""
    cost = MODELS[name]
    once = machine(cost, None, pieces)
    ways = (once, machine(cost, admission_costs(cost, H100, pieces), pieces))
    alone = run(replace(once, time=StepTime(H100, EFFICIENCY, EFFICIENCY)), prompt, output, rows).seconds
    first, second = (alone / run(engine, prompt, output, rows).seconds for engine in ways)
    return first, second


def counted(
    name: str, prompt: int, output: int, rows: int, pieces: bool, sizes: Sequence[int] = SIZES
) -> Iterator[float]:
    """Yield the device's share of the run's time for each fixed size of admitted groups."""
    once = machine(MODELS[name], None, pieces)
    alone = run(replace(once, time=StepTime(H100, EFFICIENCY, EFFICIENCY)), prompt, output, rows).seconds
    for size in sizes:
        with patch.object(scheduler, "BatchedAdmission", partial(Counted, size)):
            yield alone / run(once, prompt, output, rows).seconds


CASES = [("8B", 128, 0.9), ("8B", 256, 0.9), ("1B", 128, 0.75), ("1B", 256, 0.75)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output", "least"), CASES)
def test_the_device_is_busy_in_the_steady_state(name, output, least):
    once, together = shares(name, 512, output, 2000)
    print(f"{name}, prompts of 512, outputs of {output}: {once:.3f} at once, {together:.3f} together")
    assert together >= least


EVERY = list(product(MODELS, (128, 512, 2048), (64, 128, 256), (True, False)))
THINNED = [("1B", 128, 64, True), ("8B", 128, 64, False)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", [case if case in THINNED else pytest.param(case, marks=pytest.mark.slow) for case in EVERY]
)
def test_no_fixed_group_size_of_admission_is_faster(case):
    """Within half a percent, for each model and lengths, with and without piecewise capture."""
    name, prompt, output, pieces = case
    rows, sizes = (200, SIZES[1::2]) if case in THINNED else (1000, SIZES)
    once, found = shares(name, prompt, output, rows, pieces)
    others = list(counted(*case[:3], rows, pieces, sizes))
    print(*case, f"at once {once:.4f}, by costs {found:.4f}, by numbers", *(f"{one:.4f}" for one in others))
    assert found >= max(once, *others) - 0.005


if __name__ == "__main__":
    found = [(*sys.argv[1:4], True)] if len(sys.argv) > 1 else EVERY
    for which, *sizes, captured in found:
        asked = (str(which), int(sizes[0]), int(sizes[1]), int(sys.argv[4]) if len(sys.argv) > 4 else 1000)
        both = (*shares(*asked, pieces=bool(captured)), max(counted(*asked, pieces=bool(captured))))
        print(*asked, "in pieces" if captured else "by operators", *(f"{share:.4f}" for share in both))
