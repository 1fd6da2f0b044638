"""The first line of a run, printed before large libraries are imported."""

from __future__ import annotations

from batchinfer.core.errors import BatchInferError
from batchinfer.core.wording import counted, size
from batchinfer.input.files import list_inputs
from batchinfer.job import Job


def input_line(job: Job) -> str | None:
    """Return a line for users with the files that the job reads and their size. None if the input is invalid."""
    if job.input.sql is not None:
        return "reads the rows of a query"
    try:
        files = list_inputs(job.input.path or "", job.source.parent, job.input.format)
    except BatchInferError:
        return None
    total = size(sum(file.size for file in files))
    if len(files) == 1:
        return f"reads {files[0].path} ({total})"
    return f"reads {counted(len(files), 'file')} ({total}): {files[0].path} to {files[-1].path}"
