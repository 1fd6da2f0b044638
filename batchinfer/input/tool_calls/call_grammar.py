"""Builds grammars of answers that call a tool: the checkpoint's syntax, and arguments under the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.core.exact_json import write_exactly
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls import formats
from batchinfer.input.tool_calls.formats import HARMONY

# The schemas of the arguments of a tool without parameters, and of a tool with an empty schema
_NONE = '{"type": "object", "properties": {}, "additionalProperties": false}'
_ANY = '{"type": "object"}'
# Styles without a grammar: a JSON schema does not describe their arguments
STYLES_WITHOUT_GRAMMAR = ("qwen3-coder",)
_CALLS = "%calls%"  # placeholder for the calls in the start rule of a grammar


@dataclass(frozen=True, slots=True)
class _Frame:
    # Rules for a call of any tool; in the grammar, the rule `a0` is the arguments of the first tool, `a1` of the second
    mark: Callable[[str], str]
    names: Sequence[str]

    def alternatives(self, before: str = "", behind: str = "", joint: str = "") -> str:
        """Return a grammar rule that matches a call of any of the tools: `before`, name, `joint`, arguments, `behind`.

        Args:
            before: The text before the name.
            behind: The text after the arguments.
            joint: The text between the name and the arguments.
        """
        return " | ".join(
            " ".join(filter(None, (_text(f"{before}{name}{joint}"), f"a{number}", _text(behind))))
            for number, name in enumerate(self.names)
        )

    def object(self, arguments: str = "arguments") -> str:
        """Return a grammar rule that matches a call of any of the tools as a JSON object.

        Args:
            arguments: The key of the arguments in the object.
        """
        return self.alternatives('{"name": "', "}", f'", "{arguments}": ')

    def marked(self, before: str, mark: str, behind: str = "") -> str:
        """Return a grammar rule that matches a call of any of the tools: `before`, name, `mark`, `behind`, arguments.

        Args:
            before: The text before the name.
            mark: The marker after the name, such as a special token.
            behind: The text between the marker and the arguments.
        """
        return " | ".join(
            " ".join(filter(None, (_text(before + name), self.mark(mark), _text(behind), f"a{number}")))
            for number, name in enumerate(self.names)
        )


def call_grammar(
    style: CallStyle, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, single: bool, reasons: bool
) -> str | None:
    """Return a grammar that forces an answer to call tools, as the value of the sampling parameter `tool_call`.

    Args:
        style: The syntax of the calls.
        tools: The tools that may be called, as in OpenAI's API.
        tokenizer: The tokenizer of the checkpoint. Its special tokens are tokens in the grammar.
        single: True if the answer must be exactly one call, False for one or more.
        reasons: True if the answer reasons first.

    Returns:
        None if grammars of this style are not supported.
    """
    frame = _Frame(lambda text: _mark(text, tokenizer), [one["function"]["name"] for one in tools])
    made = _lines(style.name, frame, tokenizer, reasons)
    if made is None:
        return None
    start, call, further = made
    repeated = "" if single or further is None else f" ({further} call)*"
    lark = f"start: {start.replace(_CALLS, f'call{repeated}')}\ncall: {call}"
    schemas = [_schema(one["function"].get("parameters")) for one in tools]
    return json.dumps({"lark": lark, "schemas": schemas}, ensure_ascii=False, separators=(",", ":"))


def _lines(
    name: str, frame: _Frame, tokenizer: Tokenizer, reasons: bool
) -> tuple[str, str, str | None] | None:
    mark, template = frame.mark, tokenizer.chat_template or ""
    if name in ("hermes", "nemotron"):
        return _tagged(name, frame)
    if name == "granite":
        begin = "<tool_call>" if "<|tool_call|>" not in template else "<|tool_call|>"
        return f'{mark(begin)} "[" {_CALLS} "]"', frame.object(), '", "'
    if name == "mistral":
        return _mistral(frame, formats.ARGS in template)
    if name == "llama3":
        return _CALLS, frame.object("parameters"), None
    if name == "deepseek":
        return _deepseek(frame, "```json" in template)
    if name == HARMONY:
        header = "" if reasons else f'{mark("<|channel|>")} "commentary" '
        behind = f'" " {mark("<|constrain|>")} "json" {mark("<|message|>")}'
        return f'{header}" to=functions." {_CALLS}', _harmony(frame, behind), None
    return None


def _tagged(name: str, frame: _Frame) -> tuple[str, str, str | None]:
    if name == "nemotron":
        begin, end = frame.mark("<TOOLCALL>"), frame.mark("</TOOLCALL>")
        return f'{begin} "[" {_CALLS} "]" {end}', frame.object(), '", "'
    begin, end = frame.mark("<tool_call>"), frame.mark("</tool_call>")
    return _CALLS, f'{begin} "\\n" ({frame.object()}) "\\n" {end}', '"\\n"'


def _mistral(frame: _Frame, named: bool) -> tuple[str, str, str | None]:
    begin = frame.mark(formats.TOOL_CALLS)
    if named:
        return _CALLS, f"{begin} ({frame.marked('', formats.ARGS)})", ""
    return f'{begin} "[" {_CALLS} "]"', frame.object(), '", "'


def _deepseek(frame: _Frame, fenced: bool) -> tuple[str, str, str | None]:
    mark, separator = frame.mark, frame.mark(formats.CALL_SEP)
    begin, end = mark(formats.CALL_BEGIN), mark(formats.CALL_END)
    start = f"{mark(formats.CALLS_BEGIN)} {_CALLS} {mark(formats.CALLS_END)}"
    if fenced:
        inside = frame.alternatives("", "\n```", "\n```json\n")
        return start, f'{begin} "function" {separator} ({inside}) {end}', '"\\n"'
    return start, f"{begin} ({frame.marked('', formats.CALL_SEP)}) {end}", ""


def _harmony(frame: _Frame, behind: str) -> str:
    return " | ".join(f"{_text(name)} {behind} a{number}" for number, name in enumerate(frame.names))


def _mark(text: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.rust.token_to_id(text)
    added = tokenizer.rust.get_added_tokens_decoder()
    return f"<[{token}]>" if token in added else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(parameters: Any) -> str:
    if parameters is None:
        return _NONE
    return write_exactly(parameters) if parameters else _ANY
