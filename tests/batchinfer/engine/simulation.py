"""Rows of made-up lengths on simulated machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.spec.spec import CacheSpec
from batchinfer.plan.simulation.simulator import SimulatedEngine, SimulatedTotals
from batchinfer.plan.simulation.simulator import simulate as simulate_requests
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, Peaks
from tests.model_costs import llama_cost

LLAMA_135M = llama_cost(30, 576, 1536, 9, 3, 64, 32_000, 2, 2)
LLAMA_8B = llama_cost(32, 4096, 14_336, 32, 8, 128, 128_256, 2, 2)
CPU = Peaks(430e9, 40e9)  # two cores with AVX512_BF16
GPU = Peaks(790e12, 4.3e12)


@dataclass(frozen=True)
class Row:
    """A request of a simulation: its prompt, the length of its answer, and the limit on that length."""

    prompt: int
    output: int
    max_tokens: int | None = None  # None: the output's length is known beforehand
    prefix: int = 0  # leading tokens that are equal in all rows

    def request(self, key: int) -> Request:
        tokens = [7] * self.prefix + [1000 + key] * (self.prompt - self.prefix)
        most, known = self.max_tokens or self.output, self.max_tokens is None
        params = SamplingParams(max_tokens=most, ignore_eos=known)
        return Request(key.to_bytes(32, "big"), np.array(tokens, np.int32), params)


def simulate(
    rows: list[Row],
    *,
    blocks: int,
    seqs: int = 256,
    budget: int = 2048,
    cost: ModelCost = LLAMA_135M,
    peaks: Peaks = CPU,
    overhead_s: float = 0.0,
) -> SimulatedTotals:
    """Run the rows in this order; a step takes its roofline time plus `overhead_s`."""
    layout = one_group([CacheSpec(1, 64)] * cost.layers, 16)
    machine = SimulatedEngine(
        cost,
        layout,
        blocks,
        SchedulerConfig(seqs, budget),
        ContentRoots(100_000),
        StepTime(peaks, host_step_s=overhead_s),
        looks_ahead=False,
    )
    requests = [row.request(key) for key, row in enumerate(rows)]
    return simulate_requests(
        machine, requests, {r.key: row.output for r, row in zip(requests, rows, strict=True)}
    )
