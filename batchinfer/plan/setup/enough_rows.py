"""The guards against an input that lacks rows: an upstream failure must not replace a good result."""

from __future__ import annotations

import math
from fractions import Fraction

from batchinfer.core.errors import TooFewRows
from batchinfer.core.wording import counted
from batchinfer.data.results.published import published_input_rows
from batchinfer.job import Job


def check_any_rows(job: Job, rows: int) -> None:
    """Raise TooFewRows for an input without rows, unless the job allows that."""
    if not rows and not job.input.allow_empty:
        where = job.place("input.path" if job.input.sql is None else "input.sql")
        raise TooFewRows(
            f"{where}: the input has no rows; set input.allow_empty: true to publish an empty result"
        )


def check_enough_rows(job: Job, rows: int) -> None:
    """Check the number of rows of the whole input.

    Args:
        job: The job; a trial has no `input.min_rows`.
        rows: Input rows, error rows included.

    Raises:
        TooFewRows: The input has no rows, or fewer than `input.min_rows`.
        OutputConflict: A newer version of batchinfer wrote the published result.
    """
    check_any_rows(job, rows)
    asked = job.input.min_rows
    if isinstance(asked, float):
        published = published_input_rows(job.output.path)
        if published is None:
            return
        # The share counts as it is written: 100 * 0.29 is less than 29 in floats
        least = math.ceil(published * Fraction(str(asked)))
        why = f" ({asked} of the {counted(published, 'row')} of the result in {job.output.path})"
    else:
        least, why = asked or 0, ""
    if rows < least:
        raise TooFewRows(
            f"{job.place('input.min_rows')}: the input has {counted(rows, 'row')}, and the job needs at least "
            f"{least:,}{why}; nothing is published. Complete the input, or lower input.min_rows"
        )
