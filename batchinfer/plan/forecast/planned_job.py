"""Reads and plans the rows of a job for a forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.machine.cpus import usable_cpus
from batchinfer.plan.forecast.sampled_rows import SampledRows, sampled_rows, strata_of
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.setup.input_check import check_enough_rows
from batchinfer.plan.setup.job_setup import Setup, work_context
from batchinfer.store.answers.completion_store import read_records
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import IngestProgress, ingest, job_files, with_files


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job whose rows were read and planned.

    Attributes:
        job: The job.
        index: The index of the rows that were read.
        plan: The plan of their requests.
        stored: Parquet files of the store of answers.
        drawn: The sample of rows that was read. None if every row was read.
        input_s: Seconds of reading all rows, scaled from the sample.
        plan_s: Seconds of planning all rows, scaled from the sample.
    """

    job: Job
    index: Index
    plan: Plan
    stored: Sequence[Path]
    drawn: SampledRows | None
    input_s: float
    plan_s: float


def read_and_plan(
    job: Job,
    setup: Setup,
    state: StateFolder,
    scratch: Path,
    reading: Callable[[IngestProgress], None],
    sample: int | None,
) -> PlannedJob:
    """Read the rows of a job and plan their requests. The job's state is not changed.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        state: The job's state folder.
        scratch: Folder for temporary files.
        reading: Called with the progress while rows are read.
        sample: Approximate number of rows to read instead of all. None: all rows.

    Raises:
        BatchInferError: The input or the store cannot be read, or the input has too few rows.
    """
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
        extra_prompts=index.content_free_parts,
        shares=setup.setting.parts.shares_prefixes,
        threads=cores,
    )
    planned = time.perf_counter()
    drawn = None if strata is None else sampled_rows(index.index_parts, strata[1])
    times = 1.0 if drawn is None else drawn.factor
    return PlannedJob(job, index, plan, stored, drawn, (read - began) * times, (planned - read) * times)
