"""Checks that a tokenizer has the tokens which a job names, and that the job's constraint can be followed with it."""

from __future__ import annotations

from batchinfer.data.input.rows import RowProblem
from batchinfer.data.prompts.parameters.named_tokens import NamedTokens
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.plan.setup.job_answers import check_followed


def check_tokens(job: Job, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises JobFileError for a token that the model does not have, and as `check_followed`."""
    check_followed(job, tokenizer)
    try:
        NamedTokens(tokenizer, vocab_size).named(job.params())
    except RowProblem as problem:
        name, _, message = problem.error.message.partition(": ")
        raise job.mistake(f"sampling.{name}", message) from None
