"""A row without content: what a job's template makes of it is the prompt by which labels are calibrated."""

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
    """Return the row in which one text stands for all that its prompt shows; None: the job calibrates nothing.

    column: of the texts that are prompts as they are, where there is no template. Raises JobFileError for a template
    that prints whole rows, of which nobody knows what they have.
    """
    text, prompt = job.classify.content_free, job.prompt
    if text is None or prompt is None:
        return None
    names = (
        {column} if column is not None else template_columns(prompt.system) | template_columns(prompt.user)
    )
    if ROW_VARIABLE in names:
        message = f"is given, and the template reads {ROW_VARIABLE}, of which nothing says what it has without content"
        raise _mistake(job, message, "name the columns in the template, as in {{ body }}, or remove it")
    row = dict.fromkeys(sorted(name for name in names if name is not None), text)
    return RowBatch(file="", bytes_read=0, most_rows=1, first_row=0, rows=[row])


def check_rendered(job: Job, rows: PreparedRows) -> None:
    """Raises JobFileError where the row without content became no prompt."""
    error: RowError | None = rows.prompts.errors.get(0)
    if error is not None:
        text = job.classify.content_free
        message = f"is given, and no prompt can be made with {text!r} for all values: {error.message}"
        raise _mistake(job, message, "give another text for them, or remove it")


def _mistake(job: Job, message: str, hint: str) -> JobFileError:
    return JobFileError(str(job.source), [Mistake(_KEY, message, hint=hint)])
