"""Checks the prompt section: its source, and options that need a certain source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.job.prompt import PROMPT_SOURCES
from batchinfer.job.yaml_tree import Finding

SOURCES_TEXT = "user, messages, text and token_ids"
_WITHOUT_TEMPLATE = ("text", "token_ids")  # prompts without a chat template
_CHAT_OPTIONS = (
    "chat_template",
    "template_arguments",
    "template_arguments_from_columns",
    "tools",
    "tools_from_column",
    "tool_choice",
)
_ROW_OPTIONS = (
    "system",
    "chat",
    "template_arguments_from_columns",
    "tools_from_column",
    "tool_choice",
)  # options that OpenAI requests set themselves, or do not have


def prompt_findings(section: Mapping[str, Any], requests: bool) -> Iterator[Finding]:
    """Find mistakes in the section `prompt` of a job file.

    Args:
        section: The values of the section.
        requests: True if the input is an OpenAI batch file, which contains the prompts.
    """
    given = [name for name in PROMPT_SOURCES if section.get(name) is not None]
    if requests and not given:
        yield from _for_requests(section)
        return
    yield from _source(section, given)
    if len(given) == 1:
        yield from _chat(section, given[0])
        yield from _choice(section)


def _source(section: Mapping[str, Any], given: list[str]) -> Iterator[Finding]:
    if not given:
        message = f"has none of {SOURCES_TEXT}; give exactly one"
        yield Finding(("prompt",), message, "OpenAI batch files need none: then write input.format: openai")
    for extra in given[1:]:
        message = f"is given together with {given[0]}; give exactly one of {SOURCES_TEXT}"
        yield Finding(("prompt", extra), message, "remove one")
    if section.get("system") is not None and given and not {"user", "messages"} & set(given):
        message = (
            f"is given, but {given[0]} takes the prompt as it is; a system message goes with user or messages"
        )
        yield Finding(("prompt", "system"), message, "remove it")


def _chat(section: Mapping[str, Any], source: str) -> Iterator[Finding]:
    if source in _WITHOUT_TEMPLATE:
        why = f"{source} takes the prompt as it is, without a chat template"
        unused: tuple[str, ...] = ("chat", *_CHAT_OPTIONS)
    elif section.get("chat") is False and source == "messages":
        message = "is false, but only a chat template makes a prompt of messages"
        yield Finding(("prompt", "chat"), message, "write the prompt as a template in user, or remove it")
        return
    elif section.get("chat") is False:
        why, unused = "chat: false uses no chat template", _CHAT_OPTIONS
        if section.get("system") is not None:
            message = (
                "is given, but chat: false makes a prompt without messages, so there is no system message"
            )
            yield Finding(("prompt", "system"), message, "put its text at the beginning of user")
    else:
        return
    for name in unused:
        if section.get(name) not in (None, (), {}):
            yield Finding(("prompt", name), f"is given, but {why}", "remove it")


def _choice(section: Mapping[str, Any]) -> Iterator[Finding]:
    choice, tools = section.get("tool_choice"), section.get("tools")
    if choice in (None, "auto") or section.get("tools_from_column") is not None:
        return
    if not tools:
        yield Finding(
            ("prompt", "tool_choice"), "is given, and there are no tools", "list them in prompt.tools"
        )
        return
    names = [name for tool in tools if isinstance(name := _tool_name(tool), str)]
    if choice != "required" and choice not in names and len(names) == len(tools):
        message = f"names no tool of prompt.tools: {', '.join(names)}"
        yield Finding(
            ("prompt", "tool_choice"), message, "write the name of a listed tool, required, or auto"
        )


def _tool_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _for_requests(section: Mapping[str, Any]) -> Iterator[Finding]:
    for name in _ROW_OPTIONS:
        if section.get(name) not in (None, ()):
            message = (
                "is not for OpenAI batch files: each request says what it asks, chat_template_kwargs included"
            )
            yield Finding(("prompt", name), message, "remove it")
