"""The reasoning of a job's answers: how they mark it, and what the job asks of it."""

from __future__ import annotations

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.data.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.data.prompts.fits import with_reasoning
from batchinfer.data.tokenizer.reasoning_styles import find_reasoning
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job


def job_reasoning(job: Job, tokenizer: Tokenizer) -> Reasoning | None:
    """Return how the job's answers mark their reasoning; None: they have none, or keep it in their text. Raises
    JobFileError for a budget of reasoning that has no tokens to end it with."""
    found = find_reasoning("auto" if job.prompt is None else job.prompt.reasoning, tokenizer)
    where = _limited_by(job)
    if where is not None and (found is None or found.tokens is None):
        text = "thinking_budget: the checkpoint's chat template names no tokens around reasoning"
        raise job.mistake(where, f"{text}; name them in prompt.reasoning, or remove it")
    return found


def _limited_by(job: Job) -> str | None:
    """Return the key of the job file that limits reasoning, if one does."""
    if job.sampling.thinking_budget is not None:
        return "sampling.thinking_budget"
    if "thinking_budget" in dict(job.sampling.from_columns):
        return "sampling.from_columns"
    return "on_invalid" if any("thinking_budget" in rung for rung in job.on_invalid) else None


def most_with_reasoning(most: int, params: SamplingParams, reasoning: Reasoning | None) -> int | None:
    """Return the most tokens of an answer of at most `most` tokens with its reasoning; None: it has no bound."""
    found = with_reasoning(most, params.thinking_budget, reasoning)
    return found if found < INT32_MAX else None


def most_answer_tokens(job: Job, reasoning: Reasoning | None) -> int | None:
    """Return the most tokens of an answer, where they are known. Raises JobFileError where the job's constraint has no
    bound to fit."""
    params = job.params()
    if not job.sampling.fits or params.constraint is None:
        return None
    try:
        return most_with_reasoning(most_tokens(params), params, reasoning)
    except Unbounded as error:
        raise job.mistake("sampling.max_tokens", f"is fit, and answers have no bound: {error}") from None
