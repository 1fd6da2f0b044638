"""The dry run: the first rows of every input file, prepared as a run prepares them, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.core.errors import ErrorBudgetExceeded
from batchinfer.data.index.index import INPUT_ROW, Index
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
        errors, counts = summarise_errors(index.index_parts, index.samples), _CountedRows.of(index)
    told = index.notices
    complete = _is_complete(index, job.input.limit, counts.rows)
    budget = Budget(index.rows, job.on_error.max_error_rate, job.on_error.publish)
    if complete and budget.exceeded(index.error_rows):
        failed = ErrorCounts(index.rows, index.error_rows, 0, 0)
        raise ErrorBudgetExceeded(budget_text(failed, budget, errors))
    which = (
        f"all {counts.rows:,}"
        if complete
        else f"the first {FIRST_ROWS} of each file, {counts.rows:,} in all,"
    )
    answers = f", to get {index.rows - index.error_rows:,} answers" if index.samples else ""
    if not index.error_rows:
        return [*told, f"rows: {which} can be run{answers}"]
    return [*told, f"rows: {counts.bad:,} of {which} would become error rows{answers}:", errors.text()]


class _CountedRows(NamedTuple):
    """The rows of the input that an index has, and those of them that cannot run. A row may have several answers, each
    of which is a row of the index."""

    rows: int
    bad: int

    @classmethod
    def of(cls, index: Index) -> _CountedRows:
        if not index.samples or not index.rows:
            return cls(index.rows, index.error_rows)
        found = pq.read_table(list(index.index_parts), columns=[INPUT_ROW.name, "error_code"])
        bad = found.filter(pc.is_valid(found.column("error_code")))
        each = (pc.count_distinct(table.column(INPUT_ROW.name)).as_py() for table in (found, bad))
        return cls(*each)


def _is_complete(index: Index, limit: int | None, rows: int) -> bool:
    """Whether a sample holds every row of the job: each file was read to its end, or to the job's own limit."""
    whole = len(index.sha256) == len(index.inputs)
    return whole or (limit is not None and limit <= FIRST_ROWS and rows == limit)
