"""The section `prompt` of a job file, which describes how a row becomes a prompt."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from batchinfer.core.sampling import Truncate
from batchinfer.job.field_types import (
    ArgumentColumns,
    Column,
    PathField,
    ReasoningMarks,
    TemplateArguments,
    Text,
    ToolCalls,
    ToolChoice,
    Tools,
)
from batchinfer.job.section import Section

PROMPT_SOURCES = ("user", "messages", "text", "token_ids")


class PromptSection(Section):
    """The prompt of a row: exactly one of user, messages, text and token_ids."""

    system: Text | None = Field(
        default=None,
        description="System message before `user` or `messages`; a Jinja template.",
    )
    user: Text | None = Field(
        default=None,
        description="User message, which is inserted into the model's chat template. A Jinja template in which `{{ "
        "column }}` is the row's value.",
    )
    messages: Column | None = Field(
        default=None, description="Column with a whole chat: a list of `{role, content}`."
    )
    text: Column | None = Field(
        default=None, description="Column whose text is continued as it is, without a chat template."
    )
    token_ids: Column | None = Field(
        default=None, description="Column with the prompt's token ids, used as they are."
    )
    truncate: Truncate = Field(
        default="error",
        description="What happens to a prompt that is too long. `error`: the row becomes an error row. `left`, "
        "`right`: tokens at the prompt's start or end are cut off.",
    )
    reasoning: ReasoningMarks = Field(
        default="auto",
        description="How answers mark [reasoning](reasoning.md), which gets its own columns: `{begin: <think>, end: "
        "</think>}`. `auto`: as the chat template shows. `none`: it stays in `generated_text`.",
    )
    chat: bool = Field(
        default=True,
        description="Whether the chat template is used. `false`: [the text of `user` is the whole "
        "prompt](input.md#prompts-without-a-chat-template).",
    )
    chat_template: PathField | None = Field(
        default=None,
        description="File with a chat template (Jinja) that replaces the checkpoint's own, if any.",
    )
    template_arguments: TemplateArguments = Field(
        default=None,
        description="[Extra arguments](input.md#arguments-of-the-chat-template) of the chat template for all rows, "
        "such as `{enable_thinking: false, reasoning_effort: low}`.",
    )
    template_arguments_from_columns: ArgumentColumns = Field(
        default=(),
        description="Arguments that rows set themselves: `[enable_thinking]`, or `{enable_thinking: think_col}` for "
        "another column.",
        json_schema_extra={"default": []},
    )

    tools: Tools = Field(
        default=None,
        description="[Functions that the model may call](tools.md), as in OpenAI's API: `[{type: function, function: "
        "{name: …, parameters: {…}}}]`.",
    )
    tools_from_column: Column | None = Field(
        default=None,
        description="Column with a row's own list of tools, which replaces `tools`.",
    )

    tool_calls: ToolCalls = Field(
        default="auto",
        description="How answers write [tool calls](tools.md), which get their own column: the name of a "
        "[style](tools.md#styles). `auto`: as the chat template shows. `none`: they stay in "
        "`generated_text`.",
    )
    tool_choice: ToolChoice = Field(
        default="auto",
        description="Whether answers must [call a tool](tools.md#asking-for-a-call). `auto`: the model decides. "
        "`required`: one or more calls. The name of a tool: one call of it.",
    )

    @property
    def source(self) -> str | None:
        """Return the key of the prompt's source, such as "user", or None if the input has OpenAI requests."""
        return next((name for name in PROMPT_SOURCES if getattr(self, name) is not None), None)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template that the section sets for all rows, by name."""
        found: dict[str, Any] = json.loads(self.template_arguments or "{}")
        return found

    @property
    def given_tools(self) -> dict[str, Any]:
        """Return {"tools": the section's tools for all rows}, an argument of the chat template; {} without tools."""
        return {} if self.tools is None else {"tools": json.loads(self.tools)}

    @property
    def may_call(self) -> bool:
        """Return True if answers may call tools: the section gives tools, or names a style of tool calls."""
        return bool(self.tool_keys()) or self.tool_calls not in ("auto", "none")

    @property
    def forced_call(self) -> dict[str, Any]:
        """Return {"tool_choice": …} as in an OpenAI request if every answer must call a tool, else {}."""
        if self.tool_choice == "auto":
            return {}
        named = {"type": "function", "function": {"name": self.tool_choice}}
        return {"tool_choice": "required" if self.tool_choice == "required" else named}

    def tool_keys(self) -> list[str]:
        """Return the keys of this section that give tools and are set: "tools", "tools_from_column", both or none."""
        return [name for name in ("tools", "tools_from_column") if getattr(self, name) is not None]

    def argument_keys(self) -> list[tuple[str, str]]:
        """Return (name of the argument, key of this section that sets it) for each argument of the chat template."""
        columns = "template_arguments_from_columns"
        return [
            *((name, f"template_arguments.{name}") for name in self.arguments),
            *((name, columns) for name, _ in self.template_arguments_from_columns),
        ]
