"""Whether the host keeps an H100 busy, in the simulator: with times of the host as they were measured, and peaks and
efficiencies of the device as they were measured on one.

    python -m tests.batchinfer.simulation.test_steady_state [MODEL PROMPT OUTPUT ROWS]

A decode step of 256 rows takes the host 0.9 ms (tests/batchinfer/engine/host_work.py), and replaying a graph as long
again; a layer of another step 1.1 ms, or, where all but attention is captured, what `REPLAY_LAYER_S` estimates.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from batchinfer.engine.budget import LAUNCH_LAYER_S, REPLAY_LAYER_S, captured_tokens, mixed_tokens
from batchinfer.engine.cache_layout import one_group
from batchinfer.engine.scheduler import SchedulerConfig
from batchinfer.models.spec import CacheSpec
from batchinfer.request import Request, SamplingParams
from batchinfer.simulation.launching import Captures
from batchinfer.simulation.simulator import Simulated, SimulatedEngine, simulate
from batchinfer.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, Peaks
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.model_costs import llama_cost

LLAMA_1B = llama_cost(16, 2048, 8192, 32, 8, 64, 128_256, 2, 2)
MODELS = {"8B": LLAMA_8B, "1B": LLAMA_1B}
H100, EFFICIENCY = Peaks(760e12, 3.0e12), 0.85
MEMORY = 55 << 30  # bytes of the cache
HOST_STEP_S, HOST_ROW_S = 1e-3, 3.5e-6
SEQS, BUDGET = 256, 8192


def machine(cost: ModelCost, mixed: int, pieces: bool = True) -> SimulatedEngine:
    layout = one_group([CacheSpec(1, 64)] * cost.layers, 16)
    host = (HOST_STEP_S, HOST_ROW_S, LAUNCH_LAYER_S, REPLAY_LAYER_S)
    time = StepTime(H100, EFFICIENCY, EFFICIENCY, *host)
    captures = Captures(SEQS, 100_000, captured_tokens(cost, H100, BUDGET) if pieces else 0)
    blocks = MEMORY // (16 * cost.kv_bytes(1))
    limits = SchedulerConfig(SEQS, BUDGET, mixed_tokens=mixed)
    return SimulatedEngine(cost, layout, blocks, limits, 100_000, time, looks_ahead=True, captures=captures)


def run(
    cost: ModelCost, prompt: int, output: int, rows: int, mixed: int, host: bool = True, pieces: bool = True
) -> Simulated:
    """Rows whose answers' lengths are drawn at random about `output`, and not known beforehand."""
    lengths = np.minimum(np.random.default_rng(1).geometric(1 / output, rows), 8 * output)
    params = SamplingParams(max_tokens=8 * output)
    requests = [
        Request(i.to_bytes(32, "big"), np.full(prompt, 1000 + i, np.int32), params) for i in range(rows)
    ]
    engine = machine(cost, mixed, pieces)
    if not host:
        engine = replace(engine, time=StepTime(H100, EFFICIENCY, EFFICIENCY))
    return simulate(engine, requests, {r.key: int(n) for r, n in zip(requests, lengths, strict=True)})


def shares(name: str, prompt: int, output: int, rows: int, pieces: bool = True) -> tuple[float, float]:
    """The time of the device alone, as a share of the run's: admitting each row at once, and several together."""
    cost = MODELS[name]
    alone = run(cost, prompt, output, rows, 0, host=False).seconds
    ways = (0, mixed_tokens(cost, H100))
    times = (run(cost, prompt, output, rows, mixed, pieces=pieces).seconds for mixed in ways)
    once, together = (alone / seconds for seconds in times)
    return once, together


CASES = [("8B", 128, 0.9), ("8B", 256, 0.9), ("1B", 128, 0.75), ("1B", 256, 0.75)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output", "least"), CASES)
def test_the_device_is_busy_in_the_steady_state(name, output, least):
    once, together = shares(name, 512, output, 2000)
    print(f"{name}, prompts of 512, outputs of {output}: {once:.3f} at once, {together:.3f} together")
    assert together >= least


def test_admitting_rows_together_keeps_a_device_busy():
    """Where each step that reads prompts is launched operator by operator, more than where it is captured in pieces."""
    once, together = shares("1B", 512, 64, 500, pieces=False)
    assert together > 1.1 * once
    assert shares("1B", 512, 64, 500)[0] > 1.1 * once


def test_where_prompts_keep_the_device_busy_nothing_waits():
    """Eight rows end in each step: a mixed step takes the device longer than the host."""
    once, together = shares("8B", 512, 32, 500)
    assert together > 0.98 * once


if __name__ == "__main__":
    for case in [sys.argv[1:]] if len(sys.argv) > 1 else [(n, 512, o, 2000) for n, o, _ in CASES]:
        which, *sizes = case
        print(*case, *(f"{share:.3f}" for share in shares(str(which), *map(int, sizes))))
