"""The tokens that a job names in its sampling parameters."""

from __future__ import annotations

from batchinfer.data.input.rows import RowProblem
from batchinfer.data.prompts.parameters.named_tokens import NamedTokens
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job


def check_named_tokens(job: Job, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises JobFileError for a token that the model does not have."""
    try:
        NamedTokens(tokenizer, vocab_size).named(job.params())
    except RowProblem as problem:
        name, _, message = problem.error.message.partition(": ")
        raise job.mistake(f"sampling.{name}", message) from None
