"""The calls of tools in a job's answers: the style in which they are read."""

from __future__ import annotations

from batchinfer.core.tool_calls import CallStyle
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.data.tool_calls.call_grammar import UNASKED
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
    if job.prompt is not None and job.prompt.asked_call:
        _check_choice(job, found)
    return found


def _check_choice(job: Job, style: CallStyle | None) -> None:
    """Raise JobFileError if the call that the job asks for cannot be a constraint on its answers."""
    constraint = job.params().constraint
    if style is None:
        why = "nothing shows how the checkpoint writes calls; name the style in prompt.tool_calls"
    elif style.name in UNASKED:
        why = f"calls in the style {style.name} cannot be asked for; write auto"
    elif constraint is not None:
        why = f"an answer can have only one constraint, and the job has {constraint}"
    elif job.sampling.fits:
        why = "the longest call of a tool is not known, so that max_tokens: fit does not go with it"
    else:
        return
    raise job.mistake("prompt.tool_choice", f"is given, but {why}")
