"""How many error rows a job bears, and what is said when there are more."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from batchinfer.store.results.error_summary import ErrorSummary
from batchinfer.store.results.join import ErrorCounts


@dataclass(frozen=True, slots=True)
class Budget:
    """How many error rows a job bears. Errors only grow in number: once exceeded, certain."""

    rows: int
    max_error_rate: float
    publish: bool
    already: int = 0  # error rows that are known before the engine starts

    @property
    def allowed(self) -> int:
        """Counted with the rate as it is written: 100 × 0.29 is 28.99… in floats."""
        return int(self.rows * Fraction(str(self.max_error_rate)))

    def exceeded(self, errors: int) -> bool:
        return errors > 0 and errors > self.allowed  # asked for each message of an engine: fractions are slow

    def starting_at(self, errors: int) -> Budget:
        return replace(self, already=errors)


def budget_text(counts: ErrorCounts, budget: Budget, errors: ErrorSummary, command: str = "") -> str:
    """Say that more rows are errors than the budget allows: how many, why, and what to do.

    Args:
        command: The command that shows these rows; empty if there is none.
    """
    allowed = f"on_error.max_error_rate allows {budget.allowed} ({budget.max_error_rate:.2%})"
    again = f"; --retry-errors runs {counts.retryable} of them again" if counts.retryable else ""
    are = "is an error" if counts.errors == 1 else "are errors"
    text = (
        f"{counts.errors} of {counts.rows} rows {are}, and {allowed}; correct them, or raise the rate{again}"
    )
    return "\n".join(filter(None, [text, errors.text(), command and f"  to see them: {command}"]))


def show_errors(results: Path, partial: bool) -> str:
    """Return the command that shows the error rows of a result, or of a run that published none (`partial`)."""
    return f"batchinfer show {shlex.quote(str(results))} --errors{' --partial' if partial else ''}"
