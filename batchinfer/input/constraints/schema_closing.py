"""Finds the objects of a JSON Schema that may be closed, that is, get `additionalProperties: false`.

An object may be closed if no other schema that applies to it could name more properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchinfer.input.constraints.schema_references import References, UnknownReference

_LISTS = ("allOf", "anyOf", "oneOf")
_OF_OBJECTS = frozenset(
    ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
)
_OPENS = frozenset(("additionalProperties", "patternProperties", "minProperties", *_LISTS, "$ref"))
_MOST_BRANCHES = 100  # maximum number of alternatives of a oneOf that are compared in pairs
_MOST_TURNS = 8  # maximum number of rounds of the search for alternatives that must stay open
_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))


def is_closable(schema: dict[str, Any]) -> bool:
    """Return True if `additionalProperties: false` may be added to a schema, judging by the schema's own keywords.

    It may if the schema lists `properties`, and has no keyword that concerns other properties, such as `$ref`.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or _OPENS & schema.keys():
        return False
    if schema.get("type", "object") != "object" or {"enum", "const"} & schema.keys():
        return False
    return isinstance(required, list) and all(isinstance(n, str) and n in properties for n in required)


def has_further_names(schema: dict[str, Any]) -> bool:
    """Return True if a schema names properties, but also allows properties that it does not name."""
    named = any(schema.get(keyword) for keyword in ("properties", "patternProperties", "required"))
    return named and schema.get("additionalProperties") is not False


def combined_schemas(schemas: Iterable[dict[str, Any]], references: References) -> set[int]:
    """Return the ids (`id()`) of the schemas that apply to an object together with another schema, such as by `allOf`.

    `additionalProperties: false` must not be added to such a schema, since the other schema may name further
    properties.

    Args:
        schemas: All subschemas of the document.
        references: The references (`$ref`) of the document.
    """
    pending: list[Any] = []
    for one in schemas:
        combining = [keyword for keyword in (*_LISTS, "$ref") if keyword in one]
        several = len(combining) > 1 or bool(combining and _OF_OBJECTS & one.keys())
        if several or _count(one.get("allOf")) > 1:
            pending += _in_place(one, references)
    return _reached(pending, lambda one: _in_place(one, references))


def sort_alternatives(
    schemas: list[dict[str, Any]], references: References, combined: set[int]
) -> tuple[set[int], list[dict[str, Any]]]:
    """Find the `oneOf` keywords of a document whose alternatives may get `additionalProperties: false`.

    They may if no value can match two alternatives of the user's schema.

    Args:
        schemas: All subschemas of the document.
        references: The references (`$ref`) of the document.
        combined: The ids of schemas that must not get it, from `combined_schemas`.

    Returns:
        (ids, schemas). The ids (`id()`) of all schemas inside a `oneOf` whose alternatives must not get it, and the
        schemas that have a `oneOf` whose alternatives may.
    """
    kept: set[int] = set()
    exclusive = [one for one in schemas if isinstance(one.get("oneOf"), list)]
    for _ in range(_MOST_TURNS):
        targets = {id(one): [_target(b, references) for b in one["oneOf"]] for one in exclusive}
        others = [one for one in exclusive if not _are_exclusive(targets[id(one)], kept | combined)]
        if not others:
            return kept, exclusive
        kept |= _reached([b for one in others for b in one["oneOf"]], lambda one: _within(one, references))
        removed = {id(one) for one in others}
        exclusive = [one for one in exclusive if id(one) not in removed]
    return {id(one) for one in schemas}, []


def _reached(pending: list[Any], following: Callable[[dict[str, Any]], Iterator[Any]]) -> set[int]:
    found: set[int] = set()
    while pending:
        one = pending.pop()
        if isinstance(one, dict) and id(one) not in found:
            found.add(id(one))
            pending.extend(following(one))
    return found


def _in_place(schema: dict[str, Any], references: References) -> Iterator[Any]:
    for keyword in _LISTS:
        yield from found if isinstance(found := schema.get(keyword), list) else ()
    if "$ref" in schema:
        yield _target(schema, references)


def _within(schema: dict[str, Any], references: References) -> Iterator[Any]:
    yield from _in_place(schema, references)
    for keyword in ("properties", "patternProperties"):
        yield from found.values() if isinstance(found := schema.get(keyword), dict) else ()
    yield from found if isinstance(found := schema.get("prefixItems"), list) else ()
    yield schema.get("items")
    yield schema.get("additionalProperties")


def _target(schema: Any, references: References) -> Any:
    for _ in range(32):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        try:
            schema = references.resolve(schema["$ref"])
        except UnknownReference:
            break
    return schema


def _are_exclusive(branches: list[Any], not_closed: set[int]) -> bool:
    if len(branches) > _MOST_BRANCHES or not all(isinstance(one, dict) for one in branches):
        return False
    if len({id(one) for one in branches} - not_closed) < len(branches):
        return False
    return all(_is_disjoint(one, other) for one in branches for other in branches if one is not other)


def _is_disjoint(closed: dict[str, Any], other: dict[str, Any]) -> bool:
    if not _types(closed) & _types(other):
        return True
    if not is_closable(closed) or _types(closed) & _types(other) != {"object"}:
        return False
    required = other.get("required")
    wanted = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
    if any(name not in closed["properties"] for name in wanted):
        return True
    marks = [name for name in wanted if name in closed.get("required", ())]
    return any(_has_other_texts(closed["properties"][name], other.get("properties"), name) for name in marks)


def _has_other_texts(mark: Any, properties: Any, name: str) -> bool:
    texts, others = _texts(mark), _texts(properties.get(name) if isinstance(properties, dict) else None)
    return bool(texts and others) and texts.isdisjoint(others)


def _texts(schema: Any) -> set[str]:
    """Return the literal texts of `const` or `enum` in a schema. Empty if the schema allows other values."""
    if not isinstance(schema, dict):
        return set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    listed = isinstance(values, list) and all(isinstance(one, str) for one in values)
    return set(values) if listed else set()


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the names of the types that a schema allows. Integers are "number"."""
    if "type" not in schema:
        return set(_TYPES)
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else str(name) for name in named}


def _count(found: Any) -> int:
    return len(found) if isinstance(found, list) else 0
