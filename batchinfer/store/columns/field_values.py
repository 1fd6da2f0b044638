"""The values of a JSON answer that its schema lists: of an enum or a boolean, each with its place in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.exact_json import written
from batchinfer.input.constraints.schema_references import References

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_JOINED = ("anyOf", "oneOf", "allOf")
_SAYS_VALUES = frozenset(
    ("enum", "const", "type", "properties", "items", "prefixItems", "additionalProperties")
)
_LISTED = {"boolean": ("true", "false"), "null": ("null",)}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value in an answer's text, [start, end), and all texts that its schema lists for it."""

    path: str  # as in `person.kind` and `tags[0]`; empty: the answer itself
    start: int
    end: int
    listed: tuple[str, ...]


@dataclass(slots=True)
class _Open:
    """An object or a list whose values are being read. `key`: the name or the number of the next one."""

    path: str
    schemas: list[Any]
    key: str | int | None


@dataclass(slots=True)
class ListedFields:
    """The fields of a JSON Schema whose values it lists. Those with a single value, such as a const, are none."""

    schema: Any
    # By path: what the schema says of the value there, and the values that it lists
    _known: dict[str, tuple[list[Any], tuple[str, ...]]] = field(default_factory=dict)

    def of(self, text: str) -> Iterator[FieldValue]:
        """Yield the listed values of an answer, which is JSON that is valid under the schema."""
        opened: list[_Open] = [_Open("", [self.schema], None)]
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
                    opened.append(_Open(path, schemas, 0 if piece == "[" else None))
                elif len(listed) > 1:
                    yield FieldValue(path, found.start(), found.end(), listed)

    def _next(self, inside: _Open) -> tuple[str, tuple[list[Any], tuple[str, ...]]]:
        """Return the path of the value that comes next, and what is known of it."""
        key, above = inside.key, inside.path
        named = f"{above}.{key}" if above else str(key)
        path = above if key is None else f"{above}[{key}]" if isinstance(key, int) else named
        if path not in self._known:
            own = inside.schemas if key is None else [_part(one, key) for one in inside.schemas]
            schemas = self._leaves([one for one in own if one is not None])
            self._known[path] = schemas, _listed(schemas)
        return path, self._known[path]

    def _leaves(self, schemas: Sequence[Any]) -> list[Any]:
        """Return the schemas that these refer to, or are made of."""
        references, pending, seen = References(self.schema), list(schemas), set[int]()
        leaves: list[Any] = []
        while pending:
            one = pending.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            within = [part for name in _JOINED for part in one.get(name, ())]
            within += [references.resolve(one["$ref"])] if "$ref" in one else []
            pending += within
            if not within or not _SAYS_VALUES.isdisjoint(one):
                leaves.append(one)
        return leaves


def _part(schema: dict[str, Any], key: str | int) -> Any:
    """Return the schema of the property or the item `key`; None: nothing is said of it."""
    if isinstance(key, str):
        named: dict[str, Any] = schema.get("properties", {})
        return named.get(key, schema.get("additionalProperties"))
    first: list[Any] = schema.get("prefixItems", [])
    return first[key] if key < len(first) else schema.get("items")


def _listed(leaves: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the values that the schemas list, as JSON; none where one of them does not list its values."""
    found = [_values(one) for one in leaves]
    return tuple(sorted({text for one in found for text in one})) if all(found) else ()


def _values(schema: dict[str, Any]) -> list[str]:
    if "enum" in schema or "const" in schema:
        return [written(value) for value in schema.get("enum", [schema.get("const")])]
    said = schema.get("type", ())
    types = [said] if isinstance(said, str) else list(said)
    return [text for one in types for text in _LISTED[one]] if all(one in _LISTED for one in types) else []
