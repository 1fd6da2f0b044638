"""Validates function tools in the form of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchinfer.core.plain_json import plain_json

MAX_TOOLS = 128  # OpenAI's limit per request
TOOL_NAME = r"[A-Za-z0-9_.-]{1,64}"
_NAME = re.compile(TOOL_NAME)
_RIGHT = "{type: function, function: {name: …, description: …, parameters: {type: object, …}}}"


class BadTools(ValueError):
    """A row's or job's list of tools is invalid. The message contains the position of the tool and the reason."""


def check_tools(value: Any, most: int) -> list[dict[str, Any]]:
    """Check a list of function tools in the form of OpenAI's API, and return a copy with JSON types only.

    Args:
        value: The list of tools.
        most: The maximum size: the characters of all texts plus the items of all lists and objects.

    Raises:
        BadTools: A tool is invalid.
        NotPlain: A value has no JSON form, is nested too deeply, or exceeds `most`.
    """
    if not isinstance(value, list | tuple):
        raise BadTools(f"must be a list of tools, as in [{_RIGHT}]")
    if len(value) > MAX_TOOLS:
        raise BadTools(f"has {len(value)} tools; the limit is {MAX_TOOLS}")
    tools: list[dict[str, Any]] = plain_json(value, most)
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name = _checked_name(number, tool)
        if name in names:
            raise BadTools(f"[{number}].function.name: {name!r} is the name of an earlier tool, too")
        names.add(name)
    return tools


def is_tool_name(name: str) -> bool:
    """Return True if OpenAI's API allows this name for a tool."""
    return _NAME.fullmatch(name) is not None


def _checked_name(number: int, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise BadTools(f"[{number}] must be a function tool, as in {_RIGHT}")
    where, name, description = f"[{number}].function", function.get("name"), function.get("description")
    if not isinstance(name, str) or not is_tool_name(name):
        raise BadTools(f"{where}.name must be 1 to 64 letters, digits, underscores, dots and hyphens")
    if description is not None and not isinstance(description, str):
        raise BadTools(f"{where}.description must be text")
    parameters = function.get("parameters")
    if parameters is not None and not _is_of_object(parameters):
        raise BadTools(f"{where}.parameters must be the JSON Schema of an object, as in {{type: object, …}}")
    return name


def _is_of_object(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (not schema or schema.get("type") == "object")
