"""The number of error rows that a job allows, and the message if there are more."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from batchinfer.store.results.error_summary import ErrorSummary
from batchinfer.store.results.join import ErrorCounts


@dataclass(frozen=True, slots=True)
class Budget:
    """The error rows that a job allows, as a maximum share of its rows.

    Error rows are never removed, so an exceeded budget stays exceeded.

    Attributes:
        rows: Number of rows of the input.
        max_error_rate: Maximum share of error rows, from 0 to 1.
        publish: True if the job publishes its result even if the budget is exceeded.
        already: Number of error rows before the engine starts.
    """

    rows: int
    max_error_rate: float
    publish: bool
    already: int = 0

    @property
    def allowed(self) -> int:
        """Return the maximum number of error rows."""
        # With floats, 100 * 0.29 is 28.99…
        return int(self.rows * Fraction(str(self.max_error_rate)))

    def exceeded(self, errors: int) -> bool:
        """Return True if this number of error rows exceeds the job's budget."""
        return errors > 0 and errors > self.allowed  # called per engine message; `allowed` is slow

    def starting_at(self, errors: int) -> Budget:
        """Return the same budget for a job that has `errors` error rows before the engine starts."""
        return replace(self, already=errors)


def budget_text(counts: ErrorCounts, budget: Budget, errors: ErrorSummary, command: str = "") -> str:
    """Return the message that a job has more error rows than its budget allows, with reasons and next steps.

    Args:
        counts: The numbers of rows and error rows.
        budget: The budget.
        errors: A summary of the errors.
        command: The command that shows the error rows; empty if there is none.
    """
    allowed = f"on_error.max_error_rate allows {budget.allowed} ({budget.max_error_rate:.2%})"
    again = f"; --retry-errors runs {counts.retryable} of them again" if counts.retryable else ""
    are = "is an error" if counts.errors == 1 else "are errors"
    text = (
        f"{counts.errors} of {counts.rows} rows {are}, and {allowed}; correct them, or raise the rate{again}"
    )
    return "\n".join(filter(None, [text, errors.text(), command and f"  to see them: {command}"]))


def show_errors(results: Path, partial: bool) -> str:
    """Return the command line that shows the error rows of a result.

    Args:
        results: The result folder.
        partial: True if the run published no result, so that the command reads its committed answers.
    """
    return f"batchinfer show {shlex.quote(str(results))} --errors{' --partial' if partial else ''}"
