"""Decides how a job turns rows into prompts, and checks that its input and checkpoint support that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.core.text import nearest
from batchinfer.input.prompts.arguments.template_arguments import (
    Arguments,
    argument_problem,
    arguments_read,
    is_given,
    reads_tools,
)
from batchinfer.input.prompts.builder import Mode
from batchinfer.input.prompts.chat_template import chat_environment, row_environment
from batchinfer.input.prompts.template_check import TemplateFault, template_fault
from batchinfer.input.reader import Shape
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tokenizer.tokenizer_source import TemplateSource

if TYPE_CHECKING:
    from batchinfer.job import Job

_CHATS = ("user", "messages")  # kinds of prompts that the chat template renders
# The time does not matter, since templates are only compiled here
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)
_COLUMNS: tuple[Mode, ...] = ("messages", "text", "token_ids")


def choose_mode(job: Job, tokenizer: Tokenizer, shape: Callable[[], Shape]) -> Mode:
    """Determine the source of the job's prompts: templates, OpenAI requests, or a column with messages, text or tokens.

    Args:
        job: The job.
        tokenizer: The tokenizer of the checkpoint.
        shape: Returns "openai" if the input has OpenAI requests. It is only called if the job leaves this open.

    Returns:
        "template", "openai", "messages", "text" or "token_ids".

    Raises:
        JobFileError: The job has no prompt, or it needs a chat template and the checkpoint has none.
    """
    if job.input.format == "openai" or (job.requests and shape() == "openai"):
        return "openai"
    if job.prompt is None or job.prompt.source is None:
        missing = "is missing" if job.prompt is None else "has none of user, messages, text and token_ids"
        raise _mistake(job, "prompt", f"{missing}, and the input is no OpenAI batch file")
    check_chat_template(job, tokenizer)
    return next((name for name in _COLUMNS if getattr(job.prompt, name) is not None), "template")


def given_template(job: Job) -> TemplateSource | None:
    """Return the chat template that the job sets in place of the checkpoint's template. None if it sets none."""
    if job.prompt is None or job.chat_template is None:
        return None
    return TemplateSource(job.chat_template, str(job.prompt.chat_template))


def check_chat_template(job: Job, tokenizer: Tokenizer) -> None:
    """Check the chat template that the job uses, and its arguments. Do nothing if the job uses no chat template.

    Args:
        job: The job.
        tokenizer: The tokenizer of the checkpoint, with the template.

    Raises:
        JobFileError: There is no chat template, the template cannot be compiled, or it does not read an argument that
            the job sets.
    """
    key = _chat_key(job)
    if key is None and not job.requests:
        return
    template = tokenizer.template
    if template is None:
        _refuse_arguments(job, f"{job.model.path} has no chat template that could read it")
        if key is not None:
            message = (
                f"{job.model.path} has no chat template; use prompt.text, or give one in prompt.chat_template"
            )
            raise _mistake(job, key, message)
        return
    _check_compiles(job, tokenizer, template)
    _check_arguments(job, template)


def _chat_key(job: Job) -> str | None:
    prompt = job.prompt
    if prompt is None or not prompt.chat:
        return None
    return next((f"prompt.{name}" for name in _CHATS if getattr(prompt, name) is not None), None)


def _check_compiles(job: Job, tokenizer: Tokenizer, template: TemplateSource) -> None:
    fault = _chat_fault(template.text)
    if fault is None:
        return
    message = f"{template.file}: {fault.text('the chat template')}"
    if job.chat_template is not None:
        raise _mistake(job, "prompt.chat_template", message)
    hint = "correct it, give another one in prompt.chat_template, or use prompt.text"
    raise JobFileError(str(tokenizer.folder), [Mistake("model.path", message, hint=hint)])


@lru_cache(maxsize=8)  # several stages of a run check the same template
def _chat_fault(template: str) -> TemplateFault | None:
    return template_fault(chat_environment(_ANY_TIME), template)


def _refuse_arguments(job: Job, message: str) -> None:
    prompt = job.prompt
    keys = [] if prompt is None else [*(key for _, key in prompt.argument_keys()), *prompt.tool_keys()]
    if keys:
        raise JobFileError(str(job.source), [Mistake(f"prompt.{key}", message) for key in keys])


def _check_arguments(job: Job, template: TemplateSource) -> None:
    if job.prompt is None:
        return
    reads = arguments_read(template.text)
    mistakes = [
        Mistake(f"prompt.{key}", *problem)
        for name, key in job.prompt.argument_keys()
        if (problem := _problem_of_argument(name, job.prompt.arguments, reads, template.file)) is not None
    ]
    if not reads_tools(template.text):
        message = f"{template.file} reads no tools"
        mistakes += [Mistake(f"prompt.{key}", message) for key in job.prompt.tool_keys()]
    if mistakes:
        raise JobFileError(str(job.source), mistakes)


def _problem_of_argument(
    name: str, values: Arguments, reads: frozenset[str], file: str
) -> tuple[str, None, str | None] | None:
    if is_given(name):
        return f"{name!r} is a name that every chat template has already; it cannot be set", None, None
    if name not in reads:
        known = f"it reads {', '.join(sorted(reads))}" if reads else "it reads none"
        near = nearest(name, sorted(reads))
        hint = None if near is None else f"did you mean {near}?"
        return f"{file} does not read the argument {name!r}; {known}", None, hint
    problem = argument_problem(name, values[name]) if name in values else None
    return None if problem is None else (problem, None, None)


def check_templates(job: Job) -> None:
    """Raise JobFileError if the job's template `prompt.system` or `prompt.user` does not compile."""
    for name in ("system", "user"):
        source = getattr(job.prompt, name, None)
        fault = template_fault(row_environment(), source) if source is not None else None
        if fault is not None:
            raise job.mistake(f"prompt.{name}", fault.text("the template"))


def _mistake(job: Job, where: str, message: str) -> JobFileError:
    return JobFileError(str(job.source), [Mistake(where, message)])
