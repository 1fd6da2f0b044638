"""Finds the values of a JSON answer whose possible values its schema lists: enums and booleans."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.exact_json import write_exactly
from batchinfer.input.constraints.schema_references import References

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_COMBINING = ("anyOf", "oneOf", "allOf")
_VALUE_KEYWORDS = frozenset(
    ("enum", "const", "type", "properties", "items", "prefixItems", "additionalProperties")
)
_LISTED = {"boolean": ("true", "false"), "null": ("null",)}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value in a JSON answer whose schema lists all possible values.

    Attributes:
        path: The path of the value, such as `person.kind` or `tags[0]`; empty for the whole answer.
        start: The position of its first character in the answer's text.
        end: The position after its last character.
        listed: All values that the schema lists, as JSON.
    """

    path: str
    start: int
    end: int
    listed: tuple[str, ...]


@dataclass(slots=True)
class _OpenValue:
    path: str
    schemas: list[Any]
    key: str | int | None


@dataclass(slots=True)
class ListedFields:
    """Finds the values in JSON answers for which the JSON schema lists several possible values.

    These are enums and booleans. Fields with a single possible value are left out.

    Attributes:
        schema: The parsed JSON schema.
    """

    schema: Any
    # By path: the schemas of the value, and its listed values
    _known: dict[str, tuple[list[Any], tuple[str, ...]]] = field(default_factory=dict)

    def of(self, text: str) -> Iterator[FieldValue]:
        """Yield the values of enums and booleans in an answer, with their positions.

        Args:
            text: The answer: JSON that matches the schema.
        """
        opened: list[_OpenValue] = [_OpenValue("", [self.schema], None)]
        for found in _PIECE.finditer(text):
            piece, inside = found[0], opened[-1]
            if piece in "}]":
                opened.pop()
            elif piece == ",":
                inside.key = inside.key + 1 if isinstance(inside.key, int) else None
            elif len(opened) > 1 and inside.key is None:
                inside.key = json.loads(piece)
            elif piece != ":":
                path, (schemas, listed) = self._next(inside)
                if piece in "{[":
                    opened.append(_OpenValue(path, schemas, 0 if piece == "[" else None))
                elif len(listed) > 1:
                    yield FieldValue(path, found.start(), found.end(), listed)

    def _next(self, inside: _OpenValue) -> tuple[str, tuple[list[Any], tuple[str, ...]]]:
        key, above = inside.key, inside.path
        named = f"{above}.{key}" if above else str(key)
        path = above if key is None else f"{above}[{key}]" if isinstance(key, int) else named
        if path not in self._known:
            own = inside.schemas if key is None else [_part(one, key) for one in inside.schemas]
            schemas = self._leaves([one for one in own if one is not None])
            self._known[path] = schemas, _listed(schemas)
        return path, self._known[path]

    def _leaves(self, schemas: Sequence[Any]) -> list[Any]:
        references, pending, seen = References(self.schema), list(schemas), set[int]()
        leaves: list[Any] = []
        while pending:
            one = pending.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            within = [part for name in _COMBINING for part in one.get(name, ())]
            within += [references.resolve(one["$ref"])] if "$ref" in one else []
            pending += within
            if not within or not _VALUE_KEYWORDS.isdisjoint(one):
                leaves.append(one)
        return leaves


def _part(schema: dict[str, Any], key: str | int) -> Any:
    if isinstance(key, str):
        named: dict[str, Any] = schema.get("properties", {})
        return named.get(key, schema.get("additionalProperties"))
    first: list[Any] = schema.get("prefixItems", [])
    return first[key] if key < len(first) else schema.get("items")


def _listed(leaves: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    found = [_values(one) for one in leaves]
    return tuple(sorted({text for one in found for text in one})) if all(found) else ()


def _values(schema: dict[str, Any]) -> list[str]:
    if "enum" in schema or "const" in schema:
        return [write_exactly(value) for value in schema.get("enum", [schema.get("const")])]
    said = schema.get("type", ())
    types = [said] if isinstance(said, str) else list(said)
    return [text for one in types for text in _LISTED[one]] if all(one in _LISTED for one in types) else []
