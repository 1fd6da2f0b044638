"""How a job turns rows into prompts, and whether its input and its checkpoint can do that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.data.input.reader import Shape
from batchinfer.data.prompts.builder import Mode
from batchinfer.data.prompts.chat_template import chat_environment, row_environment
from batchinfer.data.prompts.template_check import template_fault
from batchinfer.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batchinfer.job import Job

_CHATS = ("user", "messages")  # prompts that are rendered by the checkpoint's chat template
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)  # a template is not run here
_COLUMNS: tuple[Mode, ...] = ("messages", "text", "token_ids")


def choose_mode(job: Job, tokenizer: Tokenizer, shape: Callable[[], Shape]) -> Mode:
    """The job's own prompt, or OpenAI requests. `shape` looks at the input where only that can tell.

    Raises JobFileError for an input without prompts, and for a checkpoint that lacks the chat template.
    """
    if job.input.format == "openai" or (not job.holds_prompts and shape() == "openai"):
        return "openai"
    if not job.holds_prompts:
        raise _mistake(job, "prompt", "is missing, and the input is no OpenAI batch file")
    check_chat_template(job, tokenizer)
    return next((name for name in _COLUMNS if getattr(job.prompt, name) is not None), "template")


def check_chat_template(job: Job, tokenizer: Tokenizer) -> None:
    """Raises JobFileError for a prompt that needs a chat template where the checkpoint has none, or one that cannot be
    compiled."""
    asking = next((name for name in _CHATS if getattr(job.prompt, name, None) is not None), None)
    if asking is None and job.holds_prompts:
        return
    template = tokenizer.template
    if template is None:
        if asking is not None:
            message = f"{job.model.path} has no chat template; use prompt.text"
            raise _mistake(job, f"prompt.{asking}", message)
        return
    fault = template_fault(chat_environment(_ANY_TIME), template.text)
    if fault is not None:
        message = f"{template.file}: {fault.text('the chat template')}"
        hint = "correct it, put a valid chat_template.jinja there, or use prompt.text"
        raise JobFileError(str(tokenizer.folder), [Mistake("model.path", message, hint=hint)])


def check_templates(job: Job) -> None:
    """Raises JobFileError for templates of the job that can be parsed, and not compiled."""
    for name in ("system", "user"):
        source = getattr(job.prompt, name, None)
        fault = template_fault(row_environment(), source) if source is not None else None
        if fault is not None:
            raise job.mistake(f"prompt.{name}", fault.text("the template"))


def _mistake(job: Job, where: str, message: str) -> JobFileError:
    return JobFileError(str(job.source), [Mistake(where, message)])
