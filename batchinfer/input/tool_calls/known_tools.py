"""The tools that a row's answer may call: their names, and the types of their parameters."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Types = tuple[str, ...]
_ANY: Types = ()
_MOST_SCHEMAS = 64  # maximum number of schemas examined per parameter, since references may be cyclic
# Tools made from Python functions may use Python's names of types
_PYTHON_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_JSON_NAMES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def known_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of a row's tools and the types of their parameters as JSON text.

    The index stores the text. It is needed to parse the tool calls in answers.

    Args:
        tools: Valid tools as in OpenAI's API.
    """
    found = {one["function"]["name"]: _types(one["function"].get("parameters")) for one in tools}
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _types(parameters: Any) -> dict[str, Types]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: found for name, schema in properties.items() if (found := _named(schema, parameters))}


def _named(schema: Any, root: Mapping[str, Any]) -> Types:
    found: list[str] = []
    pending = deque([schema])
    for _ in range(_MOST_SCHEMAS):
        if not pending:
            return tuple(dict.fromkeys(found))
        one = pending.popleft()
        types = _own_types(one) if isinstance(one, Mapping) else []
        parts = [] if types or not isinstance(one, Mapping) else _parts(one, root)
        if not types and not parts:
            return _ANY
        found += types
        pending += parts
    return _ANY


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    listed = [one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)]
    if listed:
        return [_PYTHON_NAMES.get(one.lower(), one.lower()) for one in listed]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [_JSON_NAMES[type(one)] for one in values] if isinstance(values, list) else []


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    parts = [
        one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]
    ]
    path = schema.get("$ref")
    if isinstance(path, str) and path.startswith("#/"):
        found: Any = root
        for name in path[2:].split("/"):
            found = (
                found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        parts.append(found)
    return parts


class KnownTools:
    """The names of a row's tools and the types of their parameters. Create it with `KnownTools.of`."""

    def __init__(self, types: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        self._types = types

    @classmethod
    def of(cls, text: str) -> KnownTools:
        """Parse a JSON text that the function `known_tools` wrote."""
        return _read(text)

    @staticmethod
    def check(text: str) -> None:
        """Check that a text has the form that the function `known_tools` writes.

        Raises:
            ValueError, TypeError, AttributeError or RecursionError: It does not.
        """
        for types in json.loads(text).values():
            if not all(isinstance(one, str) for named in types.values() for one in named):
                raise TypeError("a type of a parameter is no text")

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def types(self, tool: str, parameter: str) -> Types:
        """Return the types in the JSON Schema of a tool's parameter.

        Empty if the tool, parameter or types are unknown.
        """
        return tuple(self._types.get(tool, {}).get(parameter, _ANY))


@lru_cache(maxsize=256)
def _read(text: str) -> KnownTools:
    # Cached, since many rows share a text
    return KnownTools(json.loads(text))
