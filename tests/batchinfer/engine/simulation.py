"""A job's time by the operators' declared costs: the real scheduler, no model."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.scheduler import Chunk, Scheduler, SchedulerConfig, Step
from batchinfer.engine.sequence import Sequence
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds
from tests.batchinfer.engine.driver import sequence
from tests.model_costs import llama_cost

LLAMA_135M = llama_cost(30, 576, 1536, 9, 3, 64, 32_000, 2, 2)
LLAMA_8B = llama_cost(32, 4096, 14_336, 32, 8, 128, 128_256, 2, 2)
CPU = Peaks(430e9, 40e9)  # two cores with AVX512_BF16
GPU = Peaks(790e12, 4.3e12)


@dataclass(frozen=True)
class Row:
    """One request: what it may answer at most, and what it will."""

    prompt: int
    output: int
    max_tokens: int | None = None  # None: the output's length is known beforehand
    prefix: int = 0  # leading tokens that are equal in all rows

    def sequence(self, key: int) -> Sequence:
        tokens = [7] * self.prefix + [1000 + key] * (self.prompt - self.prefix)
        most = self.output if self.max_tokens is None else self.max_tokens
        return sequence(tokens, most, key, exact=self.max_tokens is None)


@dataclass
class Simulated:
    """What a simulated job came to."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    recomputed: int = 0
    preemptions: int = 0
    running: int = 0  # summed over steps
    used: int = 0  # blocks, summed over steps
    unmixed: int = 0  # steps that decode only

    def add(self, step: Step, scheduler: Scheduler, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
        self.tokens += sum(c.length for c in step.chunks)
        self.recomputed += sum(c.recomputed for c in step.chunks)
        self.preemptions += step.preemptions
        self.running += len(scheduler.running)
        self.used += scheduler.pool.used


def simulate(
    rows: list[Row],
    *,
    blocks: int,
    seqs: int = 256,
    budget: int = 2048,
    cost: ModelCost = LLAMA_135M,
    peaks: Peaks = CPU,
    overhead_s: float = 0.0,
) -> Simulated:
    """Run the rows in this order, all queued at the start; a step takes its roofline time and `overhead_s`."""
    scheduler, got = Scheduler(SchedulerConfig(seqs, budget), BlockPool(blocks, 16)), Simulated()
    left: dict[Sequence, int] = {}
    for key, row in enumerate(rows):
        added = row.sequence(key)
        left[added] = row.output
        scheduler.add(added)
    while left:
        step = scheduler.schedule()
        costs = cost.step(step_shape(step.chunks, cost.layers))
        got.add(step, scheduler, roofline_seconds(costs, peaks) + overhead_s)
        for chunk in step.chunks:
            _advance(chunk, scheduler, left)
    return got


def step_shape(chunks: list[Chunk], layers: int) -> StepShape:
    pairs = sum(c.length * (c.start + c.end + 1) // 2 for c in chunks)
    tokens, sampled = sum(c.length for c in chunks), sum(c.samples for c in chunks)
    return StepShape(tokens, sampled, pairs * layers, sum(c.end for c in chunks) * layers)


def _advance(chunk: Chunk, scheduler: Scheduler, left: dict[Sequence, int]) -> None:
    running, samples = chunk.sequence, chunk.samples
    running.computed = chunk.end
    running.high_water = max(running.high_water, chunk.end)
    if samples:
        running.tokens.append(1)
        if running.output_length == left[running]:
            scheduler.finish(running)
            del left[running]
