"""What a job will take, known before it runs and without its model: `batchinfer plan`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from batchinfer.data.index.index import Index
from batchinfer.data.index.ingest import IngestOptions, IngestProgress, ingest
from batchinfer.data.results.completion_store import read_records
from batchinfer.data.results.error_summary import summarise_errors
from batchinfer.data.storage.remembered import read_strings
from batchinfer.data.storage.state import StateFolder, state_of
from batchinfer.engine.budget import scheduler_config
from batchinfer.engine.cache_layout import CacheLayout, cache_layout
from batchinfer.engine.config import DEFAULT_BLOCK_SIZE, WINDOW
from batchinfer.engine.memory import JobSize, cache_blocks
from batchinfer.job import Job
from batchinfer.memory import available_memory
from batchinfer.models.spec import CacheSpec
from batchinfer.plan.plan import Plan
from batchinfer.plan.planner import plan_job
from batchinfer.plan.requests import planned_requests
from batchinfer.preflight import Setup, check_input, check_setup
from batchinfer.report.earlier_runs import earlier_lengths, earlier_steps
from batchinfer.report.folder import report_folder
from batchinfer.request import Request
from batchinfer.simulation.answer_lengths import AnswerLengths
from batchinfer.simulation.simulator import Simulated, SimulatedEngine, simulate
from batchinfer.step_times import StepTimes, alike, step_times
from batchinfer_kernels.cost import ModelCost

# Tokens that are simulated at most: 10 microseconds each. Of a larger job every so many windows are.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompts that are to run, by length."""

    shortest: int
    median: int
    longest: int
    buckets: tuple[tuple[int, int], ...]  # (tokens at most, a power of two; prompts), none of them empty


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the run takes, at the least, and that it may take."""

    weights: int
    kv_cache: int
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """What the engine will do. Seconds are None where this machine's peaks are not known."""

    run: Simulated  # scaled from the rows that were simulated to all of them
    simulated: float  # 0…1, the share of the rows that were simulated
    answers_from: int  # earlier runs whose answers say how long these will be; 0: as long as they may be
    times: StepTimes  # what steps take, and how that is known
    seconds: float | None
    mfu: float | None
    mbu: float | None


@dataclass(frozen=True, slots=True)
class JobForecast:
    """All that is known of a job before it runs."""

    job: str
    plan: Plan
    error_codes: dict[str, int]
    setting: str  # what is computed in, and on which device
    lengths: Lengths | None  # None: nothing is to run
    memory: Memory | None
    forecast: EngineForecast | None


def forecast_job(
    job: Job, reading: Callable[[IngestProgress], None], notice: Callable[[str], None]
) -> JobForecast:
    """Read, render and tokenise every row, plan the job and simulate it. Nothing of a job's state is changed.

    `notice` gets what the input's check warns of. Raises what `run` raises before it loads the model.
    """
    state = state_of(job)
    setup = check_setup(job, state, replace=True)
    for warning in check_input(job, setup, state).warnings:
        notice(warning)
    if job.sampling.from_columns:
        notice(f"rows set their own {job.sampling.row_parameters()}")
    with tempfile.TemporaryDirectory(prefix="batchinfer-plan-") as scratch:
        index = _index(job, setup, state, Path(scratch), reading)
        stored = sorted(read_records(state.completions)[0]) if state.completions.is_dir() else []
        plan = plan_job(index.index_dir, stored, Path(scratch) / "plan")
        errors = summarise_errors(index.index_parts)
        where = f"{setup.setting.arithmetic} on {setup.setting.hardware.name or setup.setting.device}"
        facts = (job.name, plan, dict(errors.codes), where)
        if not plan.to_run:
            return JobForecast(*facts, None, None, None)
        engine, times = _engine(job, setup, plan)
        blocks, size = engine.blocks, engine.layout.block_size
        kv_cache = blocks * _block_bytes(engine.layout, engine.cost)
        memory = Memory(setup.checkpoint.weight_bytes, kv_cache, blocks, size)
        found = _forecast(plan, index, engine, times, setup, report_folder(job.results_root))
        return JobForecast(*facts, _lengths(plan), memory, found)


def _index(
    job: Job, setup: Setup, state: StateFolder, scratch: Path, reading: Callable[[IngestProgress], None]
) -> Index:
    options = IngestOptions(
        context=_context(setup, state),
        max_model_len=setup.setting.max_model_len,
        vocab_size=setup.checkpoint.spec.vocab,
        now=datetime.now().astimezone(),
    )
    return ingest(job, setup.tokenizer, options, scratch, reading)


def _context(setup: Setup, state: StateFolder) -> bytes:
    """As of a run: keys are compared with those of stored answers. Without a store weights need not be hashed."""
    return setup.context(read_strings(state.fingerprints)) if state.completions.is_dir() else b""


def _engine(job: Job, setup: Setup, plan: Plan) -> tuple[SimulatedEngine, StepTimes]:
    """The engine that the job would get, and where its steps' times are from."""
    setting = setup.setting
    config = setting.engine_config(job, plan.longest)
    cost = setting.model_cost(setup.checkpoint)
    limits, block_size = scheduler_config(config, cost), config.block_size or DEFAULT_BLOCK_SIZE
    layout = cache_layout(
        [CacheSpec(1, 1, window=window) for window in cost.windows], block_size, plan.longest
    )
    size = JobSize(plan.longest, limits.max_num_seqs, limits.max_num_batched_tokens)
    free = (setting.hardware.memory_bytes if config.device == "cuda" else available_memory()) or 1 << 62
    free -= setup.checkpoint.weight_bytes
    blocks = cache_blocks(
        _block_bytes(layout, cost), layout.sizes, size, config.kv_memory, free, config.device
    )
    earlier = earlier_steps(report_folder(job.results_root), alike(job, setting))
    times = step_times(setting, cost, earlier)
    ahead = config.device == "cuda"
    return SimulatedEngine(cost, layout, blocks, limits, plan.longest, times.time, looks_ahead=ahead), times


def _block_bytes(layout: CacheLayout, cost: ModelCost) -> int:
    """Bytes of a block, by what the layers' costs say of their caches."""
    return layout.depth * layout.block_size * max(size for _, size in cost.caches)


def _forecast(
    plan: Plan, index: Index, engine: SimulatedEngine, times: StepTimes, setup: Setup, report: Path
) -> EngineForecast:
    earlier = earlier_lengths(report)
    lengths, answers_from = AnswerLengths.unknown(), 0
    if earlier is not None:
        lengths, answers_from = AnswerLengths.of(earlier.prompts, earlier.answers), earlier.runs
    total = plan.prompt_tokens - plan.shared_prefix_tokens + plan.expected_tokens
    every = max(1, -(-total // MOST_TOKENS))
    requests, outputs = _sample(plan, index, every, lengths)
    run = simulate(engine, requests, outputs)
    share = 1.0 if every == 1 else len(requests) / plan.to_run
    whole = _scaled(run, 1 / share)
    peaks = setup.setting.peaks
    if peaks is None or not run.seconds:
        return EngineForecast(whole, share, answers_from, times, None, None, None)
    mfu = whole.flops / whole.seconds / peaks.fastest
    mbu = whole.bytes / whole.seconds / peaks.bytes_per_s
    return EngineForecast(whole, share, answers_from, times, whole.seconds, mfu, mbu)


def _sample(
    plan: Plan, index: Index, every: int, lengths: AnswerLengths
) -> tuple[list[Request], dict[bytes, int]]:
    """Every so many windows of the plan, and how long their answers will be."""
    requests: list[Request] = []
    for number, (_, read) in enumerate(planned_requests(plan, index.tokens, WINDOW)):
        if number % every == 0:
            requests += read
    return requests, {request.key: lengths.of_request(request) for request in requests}


def _scaled(run: Simulated, times: float) -> Simulated:
    if times == 1:
        return run
    scaled = {name: getattr(run, name) * times for name in Simulated.__slots__}
    whole = {
        name: round(value) if isinstance(getattr(run, name), int) else value for name, value in scaled.items()
    }
    return replace(run, **whole)


def _lengths(plan: Plan) -> Lengths:
    tokens = np.concatenate([window.numbers("token_count") for window in plan.windows(65_536)])
    bits, numbers = np.unique(np.ceil(np.log2(np.maximum(tokens, 1))).astype(int), return_counts=True)
    buckets = tuple((1 << one, number) for one, number in zip(bits.tolist(), numbers.tolist(), strict=True))
    return Lengths(int(tokens.min()), int(np.median(tokens)), int(tokens.max()), buckets)
