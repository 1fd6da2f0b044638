"""The dry run: the first rows of every input file, prepared as a run prepares them, without an engine."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import ErrorBudgetExceeded
from batchinfer.data.index.index import Index
from batchinfer.data.index.ingest import ingest
from batchinfer.data.input.reader import SampleSize
from batchinfer.data.results.error_budget import Budget, budget_text
from batchinfer.data.results.error_summary import summarise_errors
from batchinfer.data.results.join import ErrorCounts
from batchinfer.data.storage.temporary import temporary_folder
from batchinfer.job import Job
from batchinfer.plan.setup.job_setup import Setup

FIRST_ROWS = 512  # of every file: one batch of each format


def first_index(job: Job, setup: Setup, scratch: Path, rows: int) -> Index:
    """The index of the first rows of every file, made in `scratch` as a run makes it."""
    options = setup.ingest_options(workers=1, sample=SampleSize(rows))
    return ingest(job, setup.tokenizer, options, scratch)


def dry_run(job: Job, setup: Setup) -> list[str]:
    """Prepare the first rows of every file; what was found, for people. The rows of a query are not looked at.

    Raises what a run would, ErrorBudgetExceeded included where these rows are all that there are.
    """
    if job.input.sql is not None:
        return ["rows: not checked here; the rows of a query (input.sql) are checked when the job runs"]
    with temporary_folder("validate") as scratch:
        index = first_index(job, setup, Path(scratch), FIRST_ROWS)
        errors = summarise_errors(index.index_parts)
    told = index.notices
    complete = _is_complete(index, job.input.limit)
    budget = Budget(index.rows, job.on_error.max_error_rate, job.on_error.publish)
    if complete and budget.exceeded(index.error_rows):
        counts = ErrorCounts(index.rows, index.error_rows, 0, 0)
        raise ErrorBudgetExceeded(budget_text(counts, budget, errors))
    which = (
        f"all {index.rows:,}" if complete else f"the first {FIRST_ROWS} of each file, {index.rows:,} in all,"
    )
    if not index.error_rows:
        return [*told, f"rows: {which} can be run"]
    return [*told, f"rows: {index.error_rows:,} of {which} would become error rows:", errors.text()]


def _is_complete(index: Index, limit: int | None) -> bool:
    """Whether a sample holds every row of the job: each file was read to its end, or to the job's own limit."""
    whole = len(index.sha256) == len(index.inputs)
    return whole or (limit is not None and limit <= FIRST_ROWS and index.rows == limit)
