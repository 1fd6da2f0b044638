"""Writes earlier tool calls of a conversation in the form that the chat template expects.

In OpenAI's API, the arguments of a call are JSON text. Most templates take an object, and would quote a text; others
(DeepSeek's) take text, and fail with an object; some take both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from batchinfer.input.json_text import parse_value
from batchinfer.input.rows import RowProblem, kind_of

Message = dict[str, Any]
_EXAMPLE = {"q": "p"}
_EXAMPLE_TEXT = json.dumps(_EXAMPLE)


class CallTurns:
    """Converts tool calls in earlier messages of a chat to the form that its chat template expects.

    Some templates expect the arguments of a call as JSON text, others as an object.

    Args:
        render: Renders messages with the template, to try which form it expects.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    def format(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the arguments of their tool calls in the form that the template expects.

        Raises:
            RowProblem: A tool call is invalid.
        """
        if not any("tool_calls" in message for message in messages):
            return messages
        return [self._format(number, message) for number, message in enumerate(messages)]

    def _format(self, number: int, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        where, calls = f"messages[{number}].tool_calls", message["tool_calls"]
        if not isinstance(calls, list):
            raise RowProblem("prompt_type", f"{where} must be a list, not {kind_of(calls)}")
        return {**message, "tool_calls": [self._call(f"{where}[{n}]", call) for n, call in enumerate(calls)]}

    def _call(self, where: str, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowProblem("prompt_type", f"{where} must be an object with a function that has a name")
        arguments = function.get("arguments")
        if arguments is None:
            return {**call}
        formed = self._arguments(f"{where}.function.arguments", arguments)
        return {**call, "function": {**function, "arguments": formed}}

    def _arguments(self, where: str, arguments: Any) -> Any:
        if isinstance(arguments, str):
            found = _object(where, arguments)
            return arguments if self._takes_text else found
        if not isinstance(arguments, Mapping):
            kind = kind_of(arguments)
            raise RowProblem("prompt_type", f"{where} must be an object or its JSON text, not {kind}")
        return arguments if self._takes_object else json.dumps(arguments, ensure_ascii=False)

    @cached_property
    def _takes_text(self) -> bool:
        # True if the template prints JSON text as it is, without quoting it again
        return _EXAMPLE_TEXT in self._render_call(_EXAMPLE_TEXT)

    @cached_property
    def _takes_object(self) -> bool:
        # The template prints objects in another syntax than Python's, or prints neither objects nor texts
        found = self._render_call(_EXAMPLE)
        return (bool(found) and str(_EXAMPLE) not in found) or not self._takes_text

    def _render_call(self, arguments: Any) -> str:
        try:
            return self._render(_conversation(arguments))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a checkpoint's template may raise anything; rendering the row reports it
            return ""


def _conversation(arguments: Any) -> list[Message]:
    call = {"id": "a00000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": call["id"]},
    ]


def _object(where: str, text: str) -> Any:
    try:
        found = parse_value(text)
    except (RowProblem, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RowProblem("prompt_type", f"{where} must be the JSON text of an object")
    return found
