"""The calls of tools in a job's answers: the style in which they are read."""

from __future__ import annotations

from batchinfer.core.tool_calls import CallStyle
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.data.tool_calls.call_styles import find_call_style
from batchinfer.job import Job


def job_calls(job: Job, tokenizer: Tokenizer) -> CallStyle | None:
    """Return how the job's answers write calls; None: no row can have tools, or calls are not told from text. Raises
    JobFileError for a style whose tokens the checkpoint lacks."""
    said = "auto" if job.prompt is None else job.prompt.tool_calls
    if not (job.requests or (job.prompt is not None and job.prompt.may_call)):
        return None
    found = find_call_style(said, tokenizer)
    if found is None and said not in ("auto", "none"):
        raise job.mistake("prompt.tool_calls", f"is {said}, and the tokenizer lacks the tokens of this style")
    return found
