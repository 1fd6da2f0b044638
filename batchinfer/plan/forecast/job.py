"""Forecasts a job before it runs, without loading weights: the command `batchinfer plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.errors import OutOfMemory
from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.job import Job
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.devices import Devices, devices_of
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.plan.forecast.calibration import CalibrationForecast, forecast_job_calibration
from batchinfer.plan.forecast.deadline import Deadline, StopForecast, now
from batchinfer.plan.forecast.engine import PLAN_MOST_S, EngineForecast, forecast_engine
from batchinfer.plan.forecast.idle import IdleForecast, idle_forecast
from batchinfer.plan.forecast.layouts import LayoutForecast, layout_forecasts
from batchinfer.plan.forecast.lint import Linter, LintFinding
from batchinfer.plan.forecast.quantizations import QuantizedForecast, quantized_forecasts
from batchinfer.plan.forecast.sampled_rows import SampledRows, sampled_rows, strata_of
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.prefixes import PlannedPrefix, largest_prefixes
from batchinfer.plan.setup.input_check import check_enough_rows, check_input
from batchinfer.plan.setup.job_setup import Setup, check_setup, work_context
from batchinfer.store.answers.completion_store import read_records
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import IngestProgress, ingest, job_files, with_files
from batchinfer.store.results.error_summary import summarise_errors

PREFIXES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths of the requests to run, in tokens."""

    shortest: int
    median: int
    longest: int
    buckets: tuple[tuple[int, int], ...]  # (upper bound, a power of two; number of prompts)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of all engines of the run, as a lower bound."""

    weights: int
    kv_cache: int
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class JobForecast:
    """Everything that is known about a job before it runs."""

    job: str
    plan: Plan
    error_codes: dict[str, int]
    setting: str  # arithmetic and device, as text
    lengths: Lengths | None = None  # None if nothing is to run
    memory: Memory | None = None  # None if nothing is to run or the job does not fit
    forecast: EngineForecast | None = None
    drafting: EngineForecast | None = None  # draft model that answers all rows first; None without one
    # Where the draft model runs (first, or in the job's engine), and `why`. None without one.
    draft_model: dict[str, str] | None = None
    context: int = 0  # maximum tokens of a row
    # Rows that exceed `context` and become error rows. None if they are truncated instead.
    rows_over: int | None = None
    # Prefixes that save most, and their ancestors
    prefixes: list[PlannedPrefix] = field(default_factory=list)
    misfit: str | None = None  # why the job does not fit into memory, or None
    calibration: CalibrationForecast | None = None  # None if the run does not calibrate
    deadline: Deadline | None = None  # assuming that the engine starts now; None without one
    stop: StopForecast | None = None  # assuming that the run starts now; None if it does not stop
    idle: IdleForecast | None = None  # None if nothing is to run, or on another machine
    findings: tuple[LintFinding, ...] = ()  # suggestions for sharing more work between rows
    quantizations: tuple[QuantizedForecast, ...] = ()  # possible quantisations, the job's own included
    devices: Devices | None = None  # None if nothing is to run
    layouts: tuple[LayoutForecast, ...] = ()  # possible layouts on several devices
    experts: dict[str, Any] | None = None  # ExpertPlan.facts; None without expert parallelism
    sample: SampledRows | None = None  # None if every row was read


def forecast_job(
    job: Job,
    reading: Callable[[IngestProgress], None],
    notice: Callable[[str], None],
    devices: Devices | None = None,
    sample: int | None = None,
    stop_at: datetime | None = None,
    cluster: MachineFacts | None = None,
) -> JobForecast:
    """Read, render and tokenise every row, then plan and simulate the job. The job's state is not changed.

    Raises the errors that `run` raises before it computes, except OutOfMemory, which becomes part of the forecast.

    Args:
        job: The job.
        reading: Receives progress while rows are read.
        notice: Receives warnings about quantisation and the input.
        devices: Devices of another machine. None: this machine.
        sample: Approximate number of rows to read instead of all.
        stop_at: When the run stops. None: when it is done.
        cluster: Resources of an engine on a Ray cluster. None without Ray.
    """
    state = state_of(job)
    elsewhere = cluster if devices is None else MachineFacts(devices.hardware)
    here = this_machine(job.engine.device if elsewhere is None else "cpu")
    machine = elsewhere or here
    setup = check_setup(job, state, machine, replace=True, reader=here)
    for warning in (*setup.warnings, *check_input(job, setup, state).warnings):
        notice(warning)
    if job.sampling.from_columns:
        notice(f"rows set their own {job.sampling.row_parameters()}")
    with temporary_folder("plan") as scratch:
        known = _planned(job, setup, state, Path(scratch), reading, sample)
        for line in known.index.notices:
            notice(line)
        found = _counted(known.job, setup, known.plan, known.index, known.drawn)
        if not known.plan.to_run:
            return found
        if devices is None:
            found = replace(found, idle=idle_forecast(job, found.plan.rows, known.input_s, known.plan_s))
        times = 1.0 if known.drawn is None else known.drawn.times
        others = quantized_forecasts(known.job, setup, known.plan, known.index.tokens, times)
        on = devices or devices_of(machine.hardware, machine.devices)
        layouts = layout_forecasts(known.job, setup, known.plan, known.index.tokens, times, on)
        found = replace(found, quantizations=tuple(others), devices=on, layouts=layouts)
        try:
            found = _with_engine(known, setup, found, Path(scratch))
        except OutOfMemory as error:
            return replace(found, misfit=str(error))
        return found if stop_at is None else replace(found, stop=_stopping(known.plan, found, stop_at))


def _stopping(plan: Plan, found: JobForecast, at: datetime) -> StopForecast:
    """Forecast how much of a plan is done by `at`, from the engine times in `found`."""
    idle, first = found.idle, (found.drafting, found.calibration)
    before_s = 0.0 if idle is None else idle.input_s + idle.plan_s + (idle.load_s or 0.0)
    before_s += sum(one.seconds or 0.0 for one in first if one is not None)
    engine_s = None if found.forecast is None else found.forecast.seconds
    upper_bound = found.forecast is not None and found.forecast.upper_bound
    stop = StopForecast.of(at, now(), plan, before_s, engine_s, upper_bound)
    return stop if found.sample is None else stop.scaled(found.plan.rows)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A job whose rows were read and planned, with the time that both take for all rows."""

    job: Job
    index: Index
    plan: Plan
    drawn: SampledRows | None  # None if every row was read
    input_s: float
    plan_s: float


def _planned(
    job: Job,
    setup: Setup,
    state: StateFolder,
    scratch: Path,
    reading: Callable[[IngestProgress], None],
    sample: int | None,
) -> _Planned:
    strata = None
    if sample is not None:
        job = with_files(job, job_files(job, scratch))
        strata = strata_of(job, sample)
    began = time.perf_counter()
    # Without a store there are no answers to find, so weights need not be hashed for work keys
    context = work_context(setup, state) if state.completions.is_dir() else b""
    options = setup.ingest_options(context, strata=None if strata is None else strata[0])
    index = ingest(job, setup.tokenizer, options, scratch, reading)
    check_enough_rows(job, index.input_rows if strata is None else strata[1])
    read = time.perf_counter()
    stored = sorted(read_records(state.completions, digests=True)[0]) if state.completions.is_dir() else []
    folder = scratch / "plan"
    cores, attempts = usable_cpus(), index.attempts
    plan = plan_job(
        index.index_parts,
        index.tokens,
        stored,
        folder,
        setup.roots,
        attempts=attempts,
        beside=index.content_free_parts,
        shares=setup.setting.parts.shares_prefixes,
        threads=cores,
    )
    planned = time.perf_counter()
    drawn = None if strata is None else sampled_rows(index.index_parts, strata[1])
    times = 1.0 if drawn is None else drawn.times
    return _Planned(job, index, plan, drawn, (read - began) * times, (planned - read) * times)


def _with_engine(known: _Planned, setup: Setup, found: JobForecast, scratch: Path) -> JobForecast:
    """Add the results of simulating the engine. Raises OutOfMemory if the job does not fit."""
    engine = forecast_engine(known.job, setup, known.plan)
    if known.drawn is not None:
        engine = replace(engine, multiple=known.drawn.times)
    machine = engine.machine
    engines, size = setup.setting.placement.replicas, machine.layout.block_size
    weights = engine.weight_bytes * engines
    blocks = machine.blocks * engines
    memory = Memory(weights, engine.kv_cache_bytes * engines, blocks, size)
    forecast = engine.forecast(known.index.tokens, PLAN_MOST_S)
    drafting = _of_drafts(known, setup)
    times = 1.0 if known.drawn is None else known.drawn.times
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


def _of_drafts(known: _Planned, setup: Setup) -> EngineForecast | None:
    """Forecast the draft model that answers all rows first. Raises OutOfMemory if it does not fit."""
    if setup.drafting is None or setup.drafts is None:
        return None
    engine = forecast_engine(setup.drafts.job, setup.drafting, known.plan)
    if known.drawn is not None:
        engine = replace(engine, multiple=known.drawn.times)
    return engine.forecast(known.index.tokens, PLAN_MOST_S)


def _counted(job: Job, setup: Setup, plan: Plan, index: Index, drawn: SampledRows | None) -> JobForecast:
    """Return the part of the forecast that needs no engine, scaled to all rows."""
    times = 1.0 if drawn is None else drawn.times
    codes = {code: round(rows * times) for code, rows in summarise_errors(index.index_parts).codes.items()}
    drafts = setup.beside or setup.drafts
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
    cut = job.prompt is not None and job.prompt.truncate != "error"
    return None if cut else codes.get("prompt_too_long", 0)


def _lengths(plan: Plan, times: float) -> Lengths:
    tokens = np.concatenate([batch.numbers("token_count") for batch in plan.batches(65_536)])
    bits, numbers = np.unique(np.ceil(np.log2(np.maximum(tokens, 1))).astype(int), return_counts=True)
    buckets = tuple(
        (1 << one, round(number * times)) for one, number in zip(bits.tolist(), numbers.tolist(), strict=True)
    )
    return Lengths(int(tokens.min()), int(np.median(tokens)), int(tokens.max()), buckets)
