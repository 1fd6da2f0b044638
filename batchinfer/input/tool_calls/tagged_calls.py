"""Parses calls of Qwen3-Coder: each argument is between tags of its own, as text without a type."""

from __future__ import annotations

import json
import re

from batchinfer.core.tool_calls import Call
from batchinfer.input.tool_calls.json_calls import ParsedCalls, json_value
from batchinfer.input.tool_calls.known_tools import KnownTools, Types
from batchinfer.input.tool_calls.python_literals import python_value

# Some models omit tags: those around the whole call, or the end tags of a function or a value
TAGGED_BEGIN = r"(?:<tool_call>\s*+)?<function="
_FUNCTION = re.compile(r"([A-Za-z0-9_.-]{1,64})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?")
# A value without an end tag ends before the next parameter, or before the tags that end a call. A value must not
# contain the start of a call: parsing would start there again, in quadratic time
_VALUE_END = re.compile(
    r"\n?</parameter>\s*"
    r"|\n[ \t]*(?=<parameter=[^<>\n]{1,256}>)"
    r"|\n?(?=</(?:function|tool_call)>\s*(?:</tool_call>|<tool_call>|<function=|\Z))"
    r"|(?P<begin><tool_call>|<function=[A-Za-z0-9_.-]{1,64}>\s*<parameter=)"
)
_END = re.compile(r"\s*(?:</function>(?:\s*</tool_call>)?|</tool_call>)")
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}  # includes Python's words


def tagged_call(begin: re.Match[str], tools: KnownTools | None) -> ParsedCalls | None:
    """Parse a tool call in the tags of Qwen3-Coder.

    Return the call and the position after it, or None if it is invalid.

    Args:
        begin: The match of `TAGGED_BEGIN` at the start of the call.
        tools: The row's tools, or None if unknown. A call whose first tag is missing must name a known tool.
    """
    text = begin.string
    function = _FUNCTION.match(text, begin.end())
    if function is None:
        return None
    if begin[0].startswith("<function") and tools is not None and function[1] not in tools:
        return None
    members, at = [], function.end()
    while (parameter := _PARAMETER.match(text, at)) is not None:
        value = _VALUE_END.search(text, parameter.end())
        if value is None or value["begin"] is not None:
            return None
        types = () if tools is None else tools.types(function[1], parameter[1])
        written = _written(text[parameter.end() : value.start()], types)
        members.append(f"{json.dumps(parameter[1], ensure_ascii=False)}: {written}")
        at = value.end()
    end = _END.match(text, at)
    return None if end is None else ParsedCalls([Call(function[1], f"{{{', '.join(members)}}}")], end.end())


def _written(value: str, types: Types) -> str:
    # A value is a string if the tool only takes strings, or if the parsed value has none of the parameter's types. Chat
    # templates write a missing value of any type as null.
    if value.strip() == "null":
        return "null"
    if types != ("string",):
        read = _WORDS.get(value.strip().lower()) or json_value(value) or python_value(value)
        if read is not None and _fits(read, types):
            return read
    return json.dumps(value, ensure_ascii=False)


def _fits(read: str, types: Types) -> bool:
    first = read[0]
    kind = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(
        first
    )
    if not types:
        # A word or a number may be meant as a string, so only objects and lists are parsed
        return kind in ("object", "array")
    return kind in types if kind is not None else bool({"number", "integer"} & set(types))
