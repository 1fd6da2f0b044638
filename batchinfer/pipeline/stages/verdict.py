"""Compares the number of error rows with the job's error budget, and determines the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchinfer.core.errors import ErrorBudgetExceeded
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.report import Outcome
from batchinfer.report.tables.exit_status import over_budget
from batchinfer.store.index.index import Index
from batchinfer.store.results.error_budget import Budget, budget_text, show_errors
from batchinfer.store.results.error_summary import ErrorSummary, summarise_all_errors, summarise_errors
from batchinfer.store.results.join import ErrorCounts, Join, has_error_completions, join_answers
from batchinfer.store.results.made_by import MadeBy, note_made_by
from batchinfer.store.results.manifest import Manifest
from batchinfer.store.results.published import open_published


def error_budget(run: OpenRun, rows: int) -> Budget:
    """Return the error budget of a job.

    It says how many error rows are allowed, and whether a result with more error rows is published.

    Args:
        run: The run, with its job, options, state folder and report.
        rows: Number of rows of the job.
    """
    return Budget(rows, run.job.on_error.max_error_rate, run.job.on_error.publish)


def refuse_hopeless(run: OpenRun, index: Index) -> None:
    """Raise ErrorBudgetExceeded if too many rows are errors already after reading the input.

    Does nothing if the job publishes results even with too many error rows.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.
    """
    budget = error_budget(run, index.rows)
    if budget.exceeded(index.error_rows) and not budget.publish:
        counts = ErrorCounts(index.rows, index.error_rows, 0, 0)
        raise _too_many(run, counts, budget, summarise_errors(index.index_parts))


def refuse_stored_errors(run: OpenRun, index: Index, parts: Sequence[Path]) -> int:
    """Return the number of error rows before engines run: invalid rows of the input, and rows with a stored error.

    If the job publishes results even with too many error rows, stored errors are not counted.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.
        parts: Parquet files of the store that were committed before this run.

    Raises:
        ErrorBudgetExceeded: There are too many errors to publish a result.
    """
    budget, spill = error_budget(run, index.rows), run.state.staging / "errors"
    if budget.publish or not has_error_completions(parts, spill):
        return index.error_rows
    attempts = index.attempts
    join = join_answers(index.index_parts, parts, spill, attempts=attempts, reused=index.reused)
    lasting = ~join.again if run.options.retry_errors else slice(None)
    failed = index.error_rows + len(join.failed[lasting])
    if budget.exceeded(failed):
        raise _too_many(
            run, join.counts, budget, summarise_all_errors(index.index_parts, parts, spill, attempts)
        )
    return failed


def refuse_to_publish(run: OpenRun, index: Index, join: Join) -> None:
    """Raise ErrorBudgetExceeded if a finished run has too many error rows to publish its result.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.
        join: The stored answer of each row: the join of the index with the store.
    """
    budget = error_budget(run, index.rows)
    if budget.exceeded(join.counts.errors) and not budget.publish:
        spill = run.state.staging / "errors"
        errors = summarise_all_errors(index.index_parts, join.parts, spill, index.attempts)
        raise _too_many(run, join.counts, budget, errors)


def _too_many(run: OpenRun, counts: ErrorCounts, budget: Budget, errors: ErrorSummary) -> ErrorBudgetExceeded:
    run.report.note(rows_error=errors.rows, error_codes=dict(errors.codes))
    return ErrorBudgetExceeded(
        budget_text(counts, budget, errors, show_errors(run.state.results, partial=True))
    )


def judge_result(run: OpenRun, manifest: Manifest, status: str) -> Outcome:
    """Return the outcome of a run whose result is published: exit code 0, or 65 if there are too many error rows.

    A later run that finds the same result already published gets the same exit code.

    Args:
        run: The run, with its job, options, state folder and report.
        manifest: The manifest of the result.
        status: PUBLISHED, or ALREADY_PUBLISHED if an earlier run published it.
    """
    note_made_by(run.state, MadeBy.of(run.job, run.options.limit))
    found = open_published(run.state.destination) if manifest.errors else None
    errors = summarise_errors(() if found is None else found.files)
    run.report.note(
        rows=manifest.rows, rows_ok=manifest.ok, rows_error=manifest.errors, error_codes=dict(errors.codes)
    )
    budget = error_budget(run, manifest.rows)
    if not budget.exceeded(manifest.errors):
        return Outcome(0, run.report.complete(status), report=run.report.path)
    counts = ErrorCounts(manifest.rows, manifest.errors, 0, errors.retryable)
    command = show_errors(run.state.results, partial=False)
    text = f"the results are {status}, but {budget_text(counts, budget, errors, command)}"
    code = ErrorBudgetExceeded.exit_code
    return Outcome(code, run.report.complete(over_budget(status), code, text), text, run.report.path)
