"""Rows whose answers must call a tool: `tool_choice` of OpenAI requests as a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchinfer.core.sampling import SamplingParams
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.openai import CHOICE, PARALLEL
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls.call_grammar import call_grammar

Tool = Mapping[str, Any]
_RIGHT = "must be none, auto, required, or a function, as in {type: function, function: {name: …}}"


class ToolChoice:
    """Turns `tool_choice` of OpenAI requests into a constraint that forces the answer to be a tool call.

    Args:
        style: The syntax of the checkpoint's tool calls, or None if unknown.
        tokenizer: The tokenizer of the checkpoint.
        reasons: True if answers of the checkpoint may begin with reasoning between special tokens.
    """

    def __init__(self, style: CallStyle | None, tokenizer: Tokenizer, reasons: bool) -> None:
        self._style, self._tokenizer, self._reasons = style, tokenizer, reasons

    def params(
        self, params: SamplingParams, body: Mapping[str, Any], tools: Sequence[Tool] | None
    ) -> SamplingParams:
        """Return the sampling parameters of a chat request, with a constraint if `tool_choice` requires a tool call.

        Args:
            params: The sampling parameters without the tool choice.
            body: The body of the request, with `tool_choice` and `parallel_tool_calls`.
            tools: The tools of the request or the job, or None.

        Raises:
            RowProblem: The tool choice is invalid or unsupported.
        """
        choice, single = body.get(CHOICE), body.get(PARALLEL) is False
        if choice in (None, "auto", "none"):
            if single and tools:
                why = "nothing keeps a model from several calls unless tool_choice asks for one; leave it out"
                raise _bad(f"{PARALLEL}: {why}")
            return params
        chosen = _chosen(choice, tools or ())
        if params.constraint is not None:
            raise _bad(f"{CHOICE}: an answer can have only one constraint, and has {params.constraint}")
        single = single or choice != "required"
        grammar = None
        if self._style is not None:
            grammar = call_grammar(self._style, chosen, self._tokenizer, single, self._reasons)
        if grammar is None:
            known = "of unknown style" if self._style is None else f"in the style {self._style.name}"
            raise _bad(f"{CHOICE}: calls {known} cannot be asked for; write auto")
        return replace(params, tool_call=grammar)


def _chosen(choice: Any, tools: Sequence[Tool]) -> Sequence[Tool]:
    if not tools:
        raise _bad(f"{CHOICE}: asks for a call, and there are no tools")
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise _bad(f"{CHOICE}: {_RIGHT}")
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise _bad(f"{CHOICE}: there is no tool {name[:64]!r} among the tools")
    return found


def _bad(message: str) -> RowProblem:
    return RowProblem("bad_parameter", message)
