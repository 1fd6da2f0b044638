"""The forecast of an engine that runs a plan: the same simulation for `plan` and at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from batchinfer.core.request import Request
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.job import Job
from batchinfer.machine.devices import Devices, devices_of
from batchinfer.plan.forecast.divided import (
    chooses_among_all,
    measured_stages,
)
from batchinfer.plan.forecast.room import beside_block, captures_of, engine_room
from batchinfer.plan.forecast.step_times import StepTimes, alike, step_times
from batchinfer.plan.forecast.time_range import TimeRange, engine_range, other_range, unmeasured_s
from batchinfer.plan.order.backlog import share_of
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts, planned_requests
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import engine_weights
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.extrapolation import simulated_part, simulated_whole
from batchinfer.plan.simulation.simulator import Simulated, SimulatedEngine, block_bytes
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
# What a simulation takes: the bench's mixed, decode and shared-prefix with 2,000 and 4,000 rows took 0.13 ms a row and
# 4 to 5 microseconds an output token on a Zen 4 server core; with two rows at once a step took 0.1 ms on a Zen 3 one.
ROW_S, OUTPUT_TOKEN_S, STEP_S = 150e-6, 5e-6, 100e-6
PLAN_MOST_S = 5.0  # what `plan` may simulate for
RUN_SHARE, RUN_LEAST_S = 0.01, 0.3  # of a run: a share of the time that it takes at the least, or seconds
STRETCHES, LEAST_STRETCH = 16, 16  # of the requests that are simulated; requests
TWO_PARTS = 1.5  # a part and its half are simulated
# Rows that are simulated, and tokens of their prompts, which are held in memory; twice as many at the most
MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 25
FULL_BATCHES = 4  # in a part, at the least: in its half, too, rows have to wait until others have ended


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """A forecast of the engine's run. Seconds are None where this machine's peaks are not known."""

    run: Simulated  # scaled from the rows that were simulated to all of them
    simulated: float  # 0…1, the share of the rows that were simulated
    answers_from: int  # earlier runs whose answers say how long these will be; 0: as long as they may be
    upper_bound: bool  # some answers may be shorter than the max_tokens with which they were simulated
    times: StepTimes  # what steps take, and how that is known
    seconds: float | None = None
    within: TimeRange | None = None  # None where `seconds` is
    waits: float | None = (
        None  # the share of its time that a stage waits, in the mean; None: there are no stages
    )
    mfu: float | None = None
    mbu: float | None = None
    energy_j: float | None = None  # None where no run of this model on this machine knows what it took
    proposals: EarlierProposals | None = (
        None  # of the last run, where the job has drafts, which are not counted here
    )


@dataclass(frozen=True, slots=True)
class ForecastEngine:
    """The engine that a job would get."""

    job: Job
    setup: Setup
    plan: Plan
    machine: SimulatedEngine
    times: StepTimes
    lengths: AnswerLengths
    answers_from: int  # earlier runs from which these are known
    # how many times as much as the plan the job is, where the plan has only a sample of its rows
    multiple: float = 1.0

    @property
    def kv_cache_bytes(self) -> int:
        layout = self.machine.layout
        beside = beside_block(self.setup, layout.block_size)
        return self.machine.blocks * (block_bytes(layout, self.machine.cost) + beside)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights of an engine, adapters and a draft model beside it included."""
        return engine_weights(self.setup.models)

    def least_s(self) -> float | None:
        """Return the seconds that the run takes at the hardware's limit, attention left out; None without peaks."""
        setting = self.setup.setting
        if setting.peaks is None:
            return None
        outputs = self.plan.expected_tokens
        tokens = self.plan.prompt_tokens - self.plan.shared_prefix_tokens + outputs
        step = self.machine.cost.step(StepShape(tokens, outputs, 0, 0))
        return roofline_seconds(step, setting.peaks) / setting.placement.replicas

    def run_budget_s(self) -> float:
        """Return for how many seconds a run may simulate itself: few compared to its own time."""
        return max(RUN_LEAST_S, RUN_SHARE * (self.least_s() or 0.0))

    def forecast(self, prompts: Prompts, budget_s: float) -> EngineForecast:
        """Simulate the plan, or of a large one as many batches as take about `budget_s` to simulate."""
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
        """Return the forecast with its seconds, and what follows from them."""
        whole, setting = found.run, self.setup.setting
        expected_s = whole.seconds
        if self.times.known == "limit":
            expected_s = unmeasured_s(whole.seconds, whole.steps, self.machine.cost.layers)
        spent_s = expected_s * setting.placement.replicas
        mfu = whole.flops / spent_s / peaks.fastest
        mbu = whole.bytes / spent_s / peaks.bytes_per_s
        folder = report_folder(self.job.results_root)
        watts = earlier_power(folder, alike(self.job, setting))
        energy_j = None if watts is None else watts * expected_s
        waits = whole.waited_s / whole.seconds if len(self.machine.stages) > 1 else None
        earlier = earlier_overhead(folder)
        within = TimeRange(
            engine_range(expected_s, self.times.known, found.upper_bound, setting.device),
            other_range(earlier, self.weight_bytes, setting.device),
            0 if earlier is None else earlier[1],
        )
        return replace(
            found, seconds=expected_s, within=within, waits=waits, mfu=mfu, mbu=mbu, energy_j=energy_j
        )

    def _whole(self, batches: list[list[Request]], lengths: AnswerLengths) -> Simulated:
        """Return the run of all batches, extrapolated from these and from half of them, on one of the engines."""
        engines = self.setup.setting.placement.replicas
        requests = share_of([request for batch in batches for request in batch], engines)
        whole = (self.plan.prompt_tokens + self.plan.expected_tokens) * self.multiple
        if self.multiple == 1 and sum(map(len, batches)) == self.plan.to_run:
            found = simulated_part(self.machine, requests, lengths)
            return found.run if engines == 1 else found.run.counted(whole / found.size)
        size = round(whole / engines)
        run = simulated_whole(self.machine, requests, half_of(requests), lengths, size)
        return run.counted(engines)

    def _proposals(self) -> EarlierProposals | None:
        drafts = self.setup.setting.parts.draft_sources(self.job)
        return earlier_proposals(report_folder(self.job.results_root)) if drafts else None

    @property
    def simulating_s(self) -> float:
        """Return about how many seconds it takes to simulate all rows of the plan on one engine."""
        token_s = OUTPUT_TOKEN_S + STEP_S / self.machine.scheduler.max_num_seqs
        return self.plan.to_run * ROW_S + self.plan.expected_tokens * token_s

    def simulation_s(self, every: int) -> float:
        """Return about how many seconds it takes to simulate one of every `every` batches, and half of those."""
        return self.simulating_s if every == 1 else self.simulating_s / every * TWO_PARTS

    def every(self, budget_s: float) -> int:
        """Return n such that one of every n batches is simulated."""
        batches = math.ceil(self.plan.to_run / REQUEST_BATCH)
        engines = self.setup.setting.placement.replicas  # of which one is simulated
        within = int(batches * budget_s * engines / self.simulating_s / TWO_PARTS)
        least = max(
            2, math.ceil(FULL_BATCHES * engines * self.machine.scheduler.max_num_seqs / REQUEST_BATCH)
        )
        rows = min(MOST_ROWS, MOST_TOKENS * self.plan.to_run // max(1, self.plan.prompt_tokens))
        return max(1, batches // max(min(within, rows // REQUEST_BATCH), least))

    def _batches(self, prompts: Prompts, every: int) -> list[list[Request]]:
        return [
            requests
            for _, requests in planned_requests(self.plan, prompts, REQUEST_BATCH, self.machine.roots, every)
        ]


def half_of(requests: Sequence[T]) -> list[T]:
    """Return every other stretch of the requests: short enough that the half has as much of the beginning as of the
    end, long enough that rows which share a prefix mostly stay together."""
    stretch = max(1, min(REQUEST_BATCH, max(LEAST_STRETCH, len(requests) // STRETCHES), len(requests) // 2))
    return [request for at, request in enumerate(requests) if at // stretch % 2 == 0]


def forecast_engine(
    job: Job, setup: Setup, plan: Plan, devices: Devices | None = None, learns: bool = True
) -> ForecastEngine:
    """Return the engine that would run the plan, which is not empty; see `simulated_engine`."""
    machine, times = simulated_engine(job, setup, plan.longest, devices, learns)
    return ForecastEngine(job, setup, plan, machine, times, *_lengths(job))


def _lengths(job: Job) -> tuple[AnswerLengths, int]:
    """Return how long answers will be, and from how many earlier runs that is known."""
    earlier = earlier_lengths(report_folder(job.results_root))
    if earlier is None:
        return AnswerLengths.unknown(), 0
    found = AnswerLengths.of(earlier.prompts, earlier.answers, earlier.cut)
    return found, earlier.runs if found.are_known else 0


def simulated_engine(
    job: Job, setup: Setup, longest: int, devices: Devices | None = None, learns: bool = True
) -> tuple[SimulatedEngine, StepTimes]:
    """Return an engine for sequences of up to `longest` tokens on `devices`, and how its times are known. None: on
    those of this machine. `learns`: whether earlier runs tell how long its steps take. Raises OutOfMemory where not
    even one sequence fits, and CannotSplit."""
    setting, room = setup.setting, engine_room(job, setup, longest)
    cost = setting.model_cost(setup.checkpoint)
    earlier = earlier_steps(report_folder(job.results_root), alike(job, setting)) if learns else None
    times = step_times(setting, cost, earlier)
    captures = captures_of(setup, cost, room.limits, longest) if setting.device == "cuda" else None
    ranks, stages = 1, tuple[SimulatedStage, ...]()
    if room.divided is not None and times.known != "runs":
        ranks = setting.placement.division.ranks
        on = devices or devices_of(setting.placement.hardware, ranks * setting.placement.replicas)
        stages = room.divided.stages(on, setting.numerics.itemsize, chooses_among_all(job))
        times = replace(times, time=replace(times.time, peaks=times.time.peaks.part(ranks)))
    elif room.divided is not None and setting.placement.division.stages > 1:
        stages = measured_stages(cost, setting.placement.division.stages)
    alone = room.divided is None and setting.parts.beside is None and setting.parts.heads is None
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
