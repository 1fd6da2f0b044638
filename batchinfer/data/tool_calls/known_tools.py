"""The tools that a row's answer may call: their names, and the types of their parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Types = tuple[str, ...]
_ANY: Types = ()


def known_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what an index keeps of checked tools, as JSON text: all that reading calls needs."""
    found = {one["function"]["name"]: _types(one["function"].get("parameters")) for one in tools}
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _types(parameters: Any) -> dict[str, Types]:
    """Return the types that a schema names for its properties."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: found for name, schema in properties.items() if (found := _named(schema))}


def _named(schema: Any) -> Types:
    said = schema.get("type") if isinstance(schema, Mapping) else None
    listed = said if isinstance(said, list) else [said]
    return tuple(one for one in listed if isinstance(one, str))


class KnownTools:
    """The tools of one row. Read with `KnownTools.of`."""

    def __init__(self, types: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        self._types = types

    @classmethod
    def of(cls, text: str) -> KnownTools:
        """Return the tools that `known_tools` wrote."""
        return _read(text)

    @staticmethod
    def check(text: str) -> None:
        """Raises ValueError, TypeError, AttributeError or RecursionError for a text that `known_tools` did not
        write."""
        for types in json.loads(text).values():
            if not all(isinstance(one, str) for named in types.values() for one in named):
                raise TypeError("a type of a parameter is no text")

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def types(self, tool: str, parameter: str) -> Types:
        """Return the types of a parameter; none where nothing says them."""
        return tuple(self._types.get(tool, {}).get(parameter, _ANY))


@lru_cache(maxsize=256)
def _read(text: str) -> KnownTools:
    """Read the text once for the many rows that share it."""
    return KnownTools(json.loads(text))
