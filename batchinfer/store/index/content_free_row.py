"""Makes the row without content, whose prompt calibrates the probabilities of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.core.request import RowError
from batchinfer.input.chunk import RowBatch
from batchinfer.input.prompts.builder import ROW_VARIABLE, template_columns
from batchinfer.input.prompts.prepared.rows import PreparedRows

if TYPE_CHECKING:
    from batchinfer.job import Job

_KEY = "classify.calibrate"


def content_free_row(job: Job, column: str | None) -> RowBatch | None:
    """Return an input row with a placeholder text in each column that the prompt reads.

    The label probabilities of this row calibrate the labels of all rows. Return None if the job does not
    calibrate labels.

    Args:
        job: The job.
        column: The column with ready prompts, if the job has no template.

    Raises:
        JobFileError: The template prints whole rows, whose columns are unknown.
    """
    text, prompt = job.classify.content_free, job.prompt
    if text is None or prompt is None:
        return None
    names = (
        {column} if column is not None else template_columns(prompt.system) | template_columns(prompt.user)
    )
    if ROW_VARIABLE in names:
        message = (
            f"cannot be used: the template reads {ROW_VARIABLE}, and its columns are unknown without content"
        )
        raise _mistake(job, message, "name the columns in the template, as in {{ body }}, or remove the key")
    row = dict.fromkeys(sorted(name for name in names if name is not None), text)
    return RowBatch(file="", bytes_read=0, most_rows=1, first_row=0, rows=[row])


def check_rendered(job: Job, rows: PreparedRows) -> None:
    """Raise JobFileError if the row of `content_free_row` could not become a prompt.

    Args:
        job: The job.
        rows: The row as the render worker prepared it.
    """
    error: RowError | None = rows.prompts.errors.get(0)
    if error is not None:
        text = job.classify.content_free
        message = f"is set, but no prompt can be made with {text!r} for all values: {error.message}"
        raise _mistake(job, message, "set another text, or remove the key")


def _mistake(job: Job, message: str, hint: str) -> JobFileError:
    return JobFileError(str(job.source), [Mistake(_KEY, message, hint=hint)])
