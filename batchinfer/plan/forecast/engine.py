"""Simulates an engine that runs a plan, for the command `plan` and at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from batchinfer.core.request import Request
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.job import Job
from batchinfer.machine.devices import Devices, devices_of
from batchinfer.plan.forecast.room import captures_of, draft_block_bytes, engine_room
from batchinfer.plan.forecast.sharded_model import (
    measured_stages,
    needs_all_logits,
)
from batchinfer.plan.forecast.step_times import StepTimes, comparable_values, step_times
from batchinfer.plan.forecast.time_range import TimeRange, engine_range, other_range, unmeasured_s
from batchinfer.plan.order.backlog import share_of
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts, read_requests
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import engine_weights
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.extrapolation import simulate_part, simulate_whole
from batchinfer.plan.simulation.simulator import SimulatedEngine, SimulatedTotals, block_bytes
from batchinfer.plan.simulation.stages import SimulatedStage
from batchinfer.report.tables.earlier_runs import (
    EarlierProposals,
    earlier_lengths,
    earlier_overhead,
    earlier_power,
    earlier_proposals,
    earlier_steps,
)
from batchinfer.report.tables.folder import report_folder
from batchinfer_kernels.cost import Peaks, StepShape, roofline_seconds

T = TypeVar("T")
# Time to simulate a row, an output token and a step. Measured with the bench's mixed, decode and shared-prefix jobs:
# 0.13 ms per row and 4 to 5 µs per output token on a Zen 4 core, 0.1 ms per step with two rows on a Zen 3 core.
ROW_S, OUTPUT_TOKEN_S, STEP_S = 150e-6, 5e-6, 100e-6
PLAN_MOST_S = 5.0  # time limit of the simulation in `plan`
RUN_SHARE, RUN_LEAST_S = 0.01, 0.3  # time limit in a run: a share of its time, and a floor
SEGMENTS, LEAST_SEGMENT = 16, 16  # number of segments of the simulated requests; minimum requests per segment
TWO_PARTS = 1.5  # an extrapolation simulates a part, and half of it
# Limits on the rows and prompt tokens of a simulation, which are in memory. They may be exceeded by a factor of two.
MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 25
FULL_BATCHES = 4  # least full batches in a part. Rows must have to wait even in half of it.


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """The forecast of the engines of a run. `seconds` to `energy_j` are None if the machine's peaks are unknown.

    Attributes:
        run: Counts and time of the run, scaled from the simulated rows to all rows.
        simulated: Share of the rows that were simulated, 0 to 1.
        answers_from: Number of earlier runs that give the answer lengths. 0: every answer has max_tokens.
        upper_bound: Whether answers may be shorter than simulated.
        times: The predictor of step durations, with the origin of its measurements.
        seconds: Expected engine time.
        within: Lower and upper ends of the engine time, and of the rest of the run's time.
        waits: Mean share of time (0 to 1) that a pipeline stage is idle. None also without pipeline parallelism.
        mfu: FLOP/s as a share of the peak, 0 to 1.
        mbu: Memory traffic per second as a share of the peak bandwidth, 0 to 1.
        energy_j: Energy in joules. None also if no earlier run measured power.
        proposals: Counts of draft tokens in the last run, only for display. None if the job has no drafts.
    """

    run: SimulatedTotals
    simulated: float
    answers_from: int
    upper_bound: bool
    times: StepTimes
    seconds: float | None = None
    within: TimeRange | None = None
    waits: float | None = None
    mfu: float | None = None
    mbu: float | None = None
    energy_j: float | None = None
    proposals: EarlierProposals | None = None


@dataclass(frozen=True, slots=True)
class ForecastEngine:
    """A simulated engine together with the job and plan that it runs.

    Attributes:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan, which may cover only a sample of the job's rows.
        machine: The simulated engine.
        times: The predictor of step durations, with the origin of its measurements.
        lengths: Forecast answer lengths.
        answers_from: Number of earlier runs that give `lengths`. 0: every answer has max_tokens.
        multiple: Rows of the job divided by rows of the plan. 1 if the plan covers all rows.
    """

    job: Job
    setup: Setup
    plan: Plan
    machine: SimulatedEngine
    times: StepTimes
    lengths: AnswerLengths
    answers_from: int
    multiple: float = 1.0

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes of the KV cache of one engine, including the caches of a draft model or draft heads."""
        layout = self.machine.layout
        of_drafts = draft_block_bytes(self.setup, layout.block_size)
        return self.machine.blocks * (block_bytes(layout, self.machine.cost) + of_drafts)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights of one engine, including adapters and a draft model."""
        return engine_weights(self.setup.models)

    def least_s(self) -> float | None:
        """Return a lower bound on the plan's time in seconds: the roofline time of all its tokens without attention.

        None if the peaks are unknown.
        """
        setting = self.setup.setting
        if setting.peaks is None:
            return None
        outputs = self.plan.expected_tokens
        tokens = self.plan.prompt_tokens - self.plan.shared_prefix_tokens + outputs
        step = self.machine.cost.step(StepShape(tokens, outputs, 0, 0))
        return roofline_seconds(step, setting.peaks) / setting.placement.replicas

    def run_budget_s(self) -> float:
        """Return how many seconds the simulation at the start of a run may take: a small share of the run's time."""
        return max(RUN_LEAST_S, RUN_SHARE * (self.least_s() or 0.0))

    def forecast(self, prompts: Prompts, budget_s: float) -> EngineForecast:
        """Simulate the plan, or a sample of a large plan, and return the forecast for all rows.

        Args:
            prompts: The token ids of all prompts.
            budget_s: Approximate number of seconds that the simulation may take.
        """
        batches = self._batches(prompts, self.every(budget_s))
        guessed = any(not request.params.has_known_length for batch in batches for request in batch)
        whole = self._whole(batches, self.lengths)
        found = EngineForecast(
            run=whole,
            simulated=sum(map(len, batches)) / (self.plan.to_run * self.multiple),
            answers_from=self.answers_from,
            upper_bound=guessed and not self.answers_from,
            times=self.times,
            proposals=self._proposals(),
        )
        peaks = self.setup.setting.peaks
        return found if peaks is None or not whole.seconds else self._timed(found, peaks)

    def _timed(self, found: EngineForecast, peaks: Peaks) -> EngineForecast:
        whole, setting = found.run, self.setup.setting
        expected_s = whole.seconds
        if self.times.basis == "limit":
            expected_s = unmeasured_s(whole.seconds, whole.steps, self.machine.cost.layers)
        spent_s = expected_s * setting.placement.replicas
        mfu = whole.flops / spent_s / peaks.fastest
        mbu = whole.bytes / spent_s / peaks.bytes_per_s
        folder = report_folder(self.job.results_root)
        watts = earlier_power(folder, comparable_values(self.job, setting))
        energy_j = None if watts is None else watts * expected_s
        waits = whole.waited_s / whole.seconds if len(self.machine.stages) > 1 else None
        earlier = earlier_overhead(folder)
        within = TimeRange(
            engine_range(expected_s, self.times.basis, found.upper_bound, setting.device),
            other_range(earlier, self.weight_bytes, setting.device),
            0 if earlier is None else earlier[1],
        )
        return replace(
            found, seconds=expected_s, within=within, waits=waits, mfu=mfu, mbu=mbu, energy_j=energy_j
        )

    def _whole(self, batches: list[list[Request]], lengths: AnswerLengths) -> SimulatedTotals:
        engines = self.setup.setting.placement.replicas
        requests = share_of([request for batch in batches for request in batch], engines)
        whole = (self.plan.prompt_tokens + self.plan.expected_tokens) * self.multiple
        if self.multiple == 1 and sum(map(len, batches)) == self.plan.to_run:
            found = simulate_part(self.machine, requests, lengths)
            return found.run if engines == 1 else found.run.counted(whole / found.size)
        size = round(whole / engines)
        run = simulate_whole(self.machine, requests, every_second_segment(requests), lengths, size)
        return run.counted(engines)

    def _proposals(self) -> EarlierProposals | None:
        drafts = self.setup.setting.parts.draft_sources(self.job)
        return earlier_proposals(report_folder(self.job.results_root)) if drafts else None

    @property
    def simulating_s(self) -> float:
        """Return about how many seconds this process needs to simulate a single engine that runs the whole plan."""
        token_s = OUTPUT_TOKEN_S + STEP_S / self.machine.scheduler.max_num_seqs
        return self.plan.to_run * ROW_S + self.plan.expected_tokens * token_s

    def simulation_s(self, every: int) -> float:
        """Return how many seconds this process needs, approximately, to simulate every n-th batch of requests.

        If n > 1, half of these requests are simulated a second time alone, to extrapolate to the whole plan.

        Args:
            every: The number n.
        """
        return self.simulating_s if every == 1 else self.simulating_s / every * TWO_PARTS

    def every(self, budget_s: float) -> int:
        """Return the number n for which simulating every n-th batch of requests takes about `budget_s` seconds.

        The sample always has enough requests to fill the engines' batches several times. 1 means the whole plan.
        """
        batches = math.ceil(self.plan.to_run / REQUEST_BATCH)
        engines = self.setup.setting.placement.replicas  # only one engine is simulated
        within = int(batches * budget_s * engines / self.simulating_s / TWO_PARTS)
        least = max(
            2, math.ceil(FULL_BATCHES * engines * self.machine.scheduler.max_num_seqs / REQUEST_BATCH)
        )
        rows = min(MOST_ROWS, MOST_TOKENS * self.plan.to_run // max(1, self.plan.prompt_tokens))
        return max(1, batches // max(min(within, rows // REQUEST_BATCH), least))

    def _batches(self, prompts: Prompts, every: int) -> list[list[Request]]:
        return [
            requests
            for _, requests in read_requests(self.plan, prompts, REQUEST_BATCH, self.machine.roots, every)
        ]


def every_second_segment(requests: Sequence[T]) -> list[T]:
    """Divide requests into consecutive segments, and return the requests of every second segment.

    The result is a sample of half of the requests. Segments are short, so that the sample covers the whole plan, but
    long enough that rows with a shared prefix mostly stay together.
    """
    segment = max(1, min(REQUEST_BATCH, max(LEAST_SEGMENT, len(requests) // SEGMENTS), len(requests) // 2))
    return [request for at, request in enumerate(requests) if at // segment % 2 == 0]


def forecast_engine(
    job: Job, setup: Setup, plan: Plan, devices: Devices | None = None, learns: bool = True
) -> ForecastEngine:
    """Prepare the forecast of a plan: return a simulated engine with the job and plan that it runs.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan, which must have requests to run.
        devices: Devices of the engines. None: the devices of this machine.
        learns: Whether to use step times of earlier runs.

    Raises:
        OutOfMemory: The longest sequence does not fit into memory.
        CannotSplit: The model cannot be sharded.
    """
    machine, times = simulated_engine(job, setup, plan.longest, devices, learns)
    return ForecastEngine(job, setup, plan, machine, times, *_lengths(job))


def _lengths(job: Job) -> tuple[AnswerLengths, int]:
    earlier = earlier_lengths(report_folder(job.results_root))
    if earlier is None:
        return AnswerLengths.unknown(), 0
    found = AnswerLengths.of(earlier.prompts, earlier.answers, earlier.truncated)
    return found, earlier.runs if found.are_known else 0


def simulated_engine(
    job: Job, setup: Setup, longest: int, devices: Devices | None = None, learns: bool = True
) -> tuple[SimulatedEngine, StepTimes]:
    """Return a simulated engine, and the predictor of its step durations with the origin of its measurements.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        longest: Maximum number of tokens of a sequence.
        devices: Devices of the engines. None: the devices of this machine.
        learns: Whether to use step times of earlier runs.

    Raises:
        OutOfMemory: The longest sequence does not fit into memory.
        CannotSplit: The model cannot be sharded.
    """
    setting, room = setup.setting, engine_room(job, setup, longest)
    cost = setting.model_cost(setup.checkpoint)
    earlier = (
        earlier_steps(report_folder(job.results_root), comparable_values(job, setting)) if learns else None
    )
    times = step_times(setting, cost, earlier)
    captures = captures_of(setup, cost, room.limits, longest) if setting.device == "cuda" else None
    ranks, stages = 1, tuple[SimulatedStage, ...]()
    if room.sharded is not None and times.basis != "runs":
        ranks = setting.placement.division.ranks
        on = devices or devices_of(setting.placement.hardware, ranks * setting.placement.replicas)
        stages = room.sharded.stages(on, setting.numerics.itemsize, needs_all_logits(job))
        times = replace(times, time=replace(times.time, peaks=times.time.peaks.part(ranks)))
    elif room.sharded is not None and setting.placement.division.stages > 1:
        stages = measured_stages(cost, setting.placement.division.stages)
    alone = room.sharded is None and setting.parts.draft_model is None and setting.parts.heads is None
    machine = SimulatedEngine(
        cost=cost,
        layout=room.layout,
        blocks=room.blocks,
        scheduler=room.limits,
        roots=replace(setup.roots, max_model_len=longest),
        time=times.time,
        looks_ahead=captures is not None,
        captures=captures,
        stages=stages,
        ranks=ranks,
        repeats=alone and captures is not None and captures.rows > 0,
    )
    return machine, times
