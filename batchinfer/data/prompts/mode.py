"""How a job turns rows into prompts, and whether its input and its checkpoint can do that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.data.input.reader import Shape
from batchinfer.data.prompts.builder import Mode
from batchinfer.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batchinfer.job import Job

_COLUMNS: tuple[Mode, ...] = ("messages", "text", "token_ids")


def choose_mode(job: Job, tokenizer: Tokenizer, shape: Callable[[], Shape]) -> Mode:
    """The job's own prompt, or OpenAI requests. `shape` looks at the input where only that can tell.

    Raises JobFileError for an input without prompts, and for a checkpoint that lacks the chat template.
    """
    if job.input.format == "openai" or (job.prompt is None and shape() == "openai"):
        return "openai"
    if job.prompt is None:
        raise _mistake(job, "prompt", "is missing, and the input is no OpenAI batch file")
    check_chat_template(job, tokenizer)
    return next((name for name in _COLUMNS if getattr(job.prompt, name) is not None), "template")


def check_chat_template(job: Job, tokenizer: Tokenizer) -> None:
    """Raises JobFileError for a prompt that needs a chat template where the checkpoint has none."""
    if job.prompt is None or tokenizer.chat_template is not None:
        return
    for name in ("user", "messages"):
        if getattr(job.prompt, name) is not None:
            message = f"{job.model.path} has no chat template; use prompt.text"
            raise _mistake(job, f"prompt.{name}", message)


def _mistake(job: Job, where: str, message: str) -> JobFileError:
    return JobFileError(str(job.source), [Mistake(where, message)])
