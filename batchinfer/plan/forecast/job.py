"""Forecasts a job before it runs, without loading weights: the command `batchinfer plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.errors import OutOfMemory
from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.job import Job
from batchinfer.machine.devices import Devices, devices_of
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.plan.forecast.calibration import CalibrationForecast, forecast_job_calibration
from batchinfer.plan.forecast.deadline import Deadline, StopForecast, now
from batchinfer.plan.forecast.earlier_answers import EarlierAnswers, earlier_answers
from batchinfer.plan.forecast.engine import PLAN_MOST_S, EngineForecast, forecast_engine
from batchinfer.plan.forecast.idle import IdleForecast, idle_forecast
from batchinfer.plan.forecast.layouts import LayoutForecast, layout_forecasts
from batchinfer.plan.forecast.lint import Linter, LintFinding
from batchinfer.plan.forecast.planned_job import PlannedJob, read_and_plan
from batchinfer.plan.forecast.quantizations import QuantizedForecast, quantized_forecasts
from batchinfer.plan.forecast.sampled_rows import SampledRows
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.prefixes import PlannedPrefix, largest_prefixes
from batchinfer.plan.setup.input_check import check_input
from batchinfer.plan.setup.job_setup import Setup, check_setup
from batchinfer.plan.setup.quality import stored_quality
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import IngestProgress
from batchinfer.store.results.error_summary import summarise_errors

PREFIXES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """The prompt lengths of the requests to run, in tokens.

    Attributes:
        shortest: The shortest prompt.
        median: The median prompt.
        longest: The longest prompt.
        buckets: A histogram: pairs of an upper bound and the number of prompts with a length above half of the bound,
            up to the bound. Bounds are powers of two.
    """

    shortest: int
    median: int
    longest: int
    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that all engines of a run need together, at least.

    Attributes:
        weights: Bytes of weights.
        kv_cache: Bytes of KV caches.
        blocks: Number of KV-cache blocks.
        block_size: Tokens per block.
    """

    weights: int
    kv_cache: int
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class JobForecast:
    """Everything that is known about a job before it runs.

    Attributes:
        job: Name of the job.
        plan: Counts of rows, requests and tokens.
        error_codes: Number of error rows by error code.
        setting: Arithmetic and device, for people.
        lengths: Prompt lengths. None if no request must run.
        memory: Memory of the engines. None if no request must run or the job does not fit.
        forecast: Forecast of the engines. None if no request must run or the job does not fit.
        drafting: Forecast of a draft model that answers all rows first. None without one.
        draft_model: Where a draft model runs (`runs`: "first" or "beside"), and the reason (`why`). None without one.
        context: Maximum number of tokens of a row.
        rows_over: Rows that exceed `context` and become error rows. None if prompts are truncated instead.
        prefixes: The shared prefixes that save the largest number of tokens, and their ancestors.
        misfit: Why the job does not fit into memory. None if it does.
        calibration: Forecast of the int4 calibration. None if the run does not calibrate.
        deadline: The job's deadline, if the engine starts now. None without one.
        stop: Number of rows that are done when the run is stopped. None if no time to stop was given.
        idle: Idle time of devices. None if no request must run, or if the forecast is for another machine.
        findings: Suggestions for sharing more work between rows.
        quantizations: Forecasts for all possible quantisations of the weights.
        devices: Devices of the engines. None if no request must run.
        layouts: Forecasts for all possible layouts on several devices.
        experts: The assignment of experts to ranks as a dictionary (`ExpertPlan.facts`). None without expert
            parallelism.
        sample: The sample of rows that was read. None if every row was read.
        quality: The last measured quality of the quantised weights, as a dictionary (fields of `Quality`). None without
            quantisation or measurement.
        earlier: Stored answers that an earlier version of the job's arithmetic made, and that run again. None without.
    """

    job: str
    plan: Plan
    error_codes: dict[str, int]
    setting: str
    lengths: Lengths | None = None
    memory: Memory | None = None
    forecast: EngineForecast | None = None
    drafting: EngineForecast | None = None
    draft_model: dict[str, str] | None = None
    context: int = 0
    rows_over: int | None = None
    prefixes: list[PlannedPrefix] = field(default_factory=list)
    misfit: str | None = None
    calibration: CalibrationForecast | None = None
    deadline: Deadline | None = None
    stop: StopForecast | None = None
    idle: IdleForecast | None = None
    findings: tuple[LintFinding, ...] = ()
    quantizations: tuple[QuantizedForecast, ...] = ()
    devices: Devices | None = None
    layouts: tuple[LayoutForecast, ...] = ()
    experts: dict[str, Any] | None = None
    sample: SampledRows | None = None
    quality: dict[str, Any] | None = None
    earlier: EarlierAnswers | None = None


def forecast_job(
    job: Job,
    reading: Callable[[IngestProgress], None],
    notice: Callable[[str], None],
    devices: Devices | None = None,
    sample: int | None = None,
    stop_at: datetime | None = None,
    cluster: MachineFacts | None = None,
) -> JobForecast:
    """Read and tokenise a job's rows, plan its requests, and simulate the engines. The job's state is not changed.

    Raises the errors that `run` raises before it computes, except OutOfMemory, which becomes part of the forecast.

    Args:
        job: The job.
        reading: Called with the progress while rows are read.
        notice: Called with each warning about quantisation and the input.
        devices: Devices of another machine, for which the forecast is made. None: this machine.
        sample: Approximate number of rows to read instead of all. None: all rows.
        stop_at: Time at which the run is stopped. None: it runs until all rows are done.
        cluster: The part of a node of a Ray cluster that one engine gets. None without Ray.
    """
    state = state_of(job)
    elsewhere = cluster if devices is None else MachineFacts(devices.hardware)
    here = this_machine(job.engine.device if elsewhere is None else "cpu")
    machine = elsewhere or here
    setup = check_setup(job, state, machine, replace=True, reader=here)
    for warning in check_input(job, setup, state).warnings:
        notice(warning)
    if job.sampling.from_columns:
        notice(f"rows set their own {job.sampling.row_parameters()}")
    with temporary_folder("plan") as scratch:
        known = read_and_plan(job, setup, state, Path(scratch), reading, sample)
        for line in known.index.notices:
            notice(line)
        found = _counted(known.job, setup, known.plan, known.index, known.drawn)
        if not known.plan.to_run:
            return found
        if devices is None:
            found = replace(found, idle=idle_forecast(job, found.plan.rows, known.input_s, known.plan_s))
        times = 1.0 if known.drawn is None else known.drawn.factor
        others = quantized_forecasts(known.job, setup, known.plan, known.index.tokens, times)
        on = devices or devices_of(machine.hardware, machine.devices)
        layouts = layout_forecasts(known.job, setup, known.plan, known.index.tokens, times, on)
        quality = stored_quality(job, setup, state)
        found = replace(found, quantizations=tuple(others), devices=on, layouts=layouts)
        found = found if quality is None else replace(found, quality=asdict(quality))
        try:
            found = _with_engine(known, setup, found, Path(scratch))
        except OutOfMemory as error:
            return replace(found, misfit=str(error))
        found = replace(found, earlier=_earlier(known, setup, state, found.forecast))
        return found if stop_at is None else replace(found, stop=_stopping(known.plan, found, stop_at))


def _stopping(plan: Plan, found: JobForecast, at: datetime) -> StopForecast:
    idle, first = found.idle, (found.drafting, found.calibration)
    before_s = 0.0 if idle is None else idle.input_s + idle.plan_s + (idle.load_s or 0.0)
    before_s += sum(one.seconds or 0.0 for one in first if one is not None)
    engine_s = None if found.forecast is None else found.forecast.seconds
    upper_bound = found.forecast is not None and found.forecast.upper_bound
    stop = StopForecast.of(at, now(), plan, before_s, engine_s, upper_bound)
    return stop if found.sample is None else stop.scaled(found.plan.rows)


def _earlier(
    known: PlannedJob, setup: Setup, state: StateFolder, forecast: EngineForecast | None
) -> EarlierAnswers | None:
    found = earlier_answers(setup, state, known.plan, known.index.tokens, known.stored, forecast)
    if found is None or known.drawn is None:
        return found
    return replace(found, answers=round(found.answers * known.drawn.factor))


def _with_engine(known: PlannedJob, setup: Setup, found: JobForecast, scratch: Path) -> JobForecast:
    engine = forecast_engine(known.job, setup, known.plan)
    if known.drawn is not None:
        engine = replace(engine, multiple=known.drawn.factor)
    machine = engine.machine
    engines, size = setup.setting.placement.replicas, machine.layout.block_size
    weights = engine.weight_bytes * engines
    blocks = machine.blocks * engines
    memory = Memory(weights, engine.kv_cache_bytes * engines, blocks, size)
    forecast = engine.forecast(known.index.tokens, PLAN_MOST_S)
    drafting = _of_drafts(known, setup)
    times = 1.0 if known.drawn is None else known.drawn.factor
    calibration = forecast_job_calibration(known.job, setup, known.plan, times)
    deadline = Deadline.of(known.job, now(), forecast, first=drafting, calibration=calibration)
    # Not on a sample: the savings would cover the sample's tokens only
    findings = () if known.drawn else tuple(Linter(known.job, setup, known.index, scratch).findings())
    return replace(
        found,
        memory=memory,
        forecast=forecast,
        drafting=drafting,
        calibration=calibration,
        deadline=deadline,
        findings=findings,
    )


def _of_drafts(known: PlannedJob, setup: Setup) -> EngineForecast | None:
    if setup.drafting is None or setup.first_draft_model is None:
        return None
    engine = forecast_engine(setup.first_draft_model.job, setup.drafting, known.plan)
    if known.drawn is not None:
        engine = replace(engine, multiple=known.drawn.factor)
    return engine.forecast(known.index.tokens, PLAN_MOST_S)


def _counted(job: Job, setup: Setup, plan: Plan, index: Index, drawn: SampledRows | None) -> JobForecast:
    times = 1.0 if drawn is None else drawn.factor
    codes = {code: round(rows * times) for code, rows in summarise_errors(index.index_parts).codes.items()}
    drafts = setup.engine_draft_model or setup.first_draft_model
    found = JobForecast(
        job.name,
        plan if drawn is None else drawn.whole_plan(plan),
        codes,
        _setting(setup),
        context=setup.setting.numerics.max_model_len,
        rows_over=_rows_over(job, codes),
        sample=drawn,
        draft_model=None if drafts is None else drafts.place.facts,
        experts=None if setup.setting.parts.experts is None else setup.setting.parts.experts.facts,
    )
    if not plan.to_run:
        return found
    prefixes = largest_prefixes(plan.prefixes, PREFIXES_SHOWN) if plan.shared_prefix_tokens else []
    if drawn is not None:
        prefixes = [drawn.whole_prefix(node) for node in prefixes]
    return replace(found, lengths=_lengths(plan, times), prefixes=prefixes)


def _setting(setup: Setup) -> str:
    setting, placement = setup.setting, setup.setting.placement
    engines = f", {placement.replicas} engines" if placement.replicas > 1 else ""
    return f"{setting.numerics.text} on {placement.hardware.name or setting.device}{engines}"


def _rows_over(job: Job, codes: Mapping[str, int]) -> int | None:
    truncates = job.prompt is not None and job.prompt.truncate != "error"
    return None if truncates else codes.get("prompt_too_long", 0)


def _lengths(plan: Plan, times: float) -> Lengths:
    tokens = np.concatenate([batch.numbers("token_count") for batch in plan.batches(65_536)])
    bits, numbers = np.unique(np.ceil(np.log2(np.maximum(tokens, 1))).astype(int), return_counts=True)
    buckets = tuple(
        (1 << one, round(number * times)) for one, number in zip(bits.tolist(), numbers.tolist(), strict=True)
    )
    return Lengths(int(tokens.min()), int(np.median(tokens)), int(tokens.max()), buckets)
