"""Finds the objects of a JSON Schema that may be closed: no other schema applied to them could name more properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchinfer.input.constraints.schema_references import References, UnknownReference

_LISTS = ("allOf", "anyOf", "oneOf")
_OF_OBJECTS = frozenset(
    ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
)
_OPENS = frozenset(("additionalProperties", "patternProperties", "minProperties", *_LISTS, "$ref"))
_MOST_BRANCHES = 100  # of a oneOf that are compared each with each
_MOST_TURNS = 8  # of the search for branches that stay open because others do
_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))


def closable(schema: dict[str, Any]) -> bool:
    """Whether it names properties and says nothing of others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or _OPENS & schema.keys():
        return False
    if schema.get("type", "object") != "object" or {"enum", "const"} & schema.keys():
        return False
    return isinstance(required, list) and all(isinstance(n, str) and n in properties for n in required)


def has_further_names(schema: dict[str, Any]) -> bool:
    """Whether it names properties, and an object under it may have others."""
    named = any(schema.get(keyword) for keyword in ("properties", "patternProperties", "required"))
    return named and schema.get("additionalProperties") is not False


def in_company(schemas: Iterable[dict[str, Any]], references: References) -> set[int]:
    """The ids of the schemas that an object has to follow together with another one."""
    pending: list[Any] = []
    for one in schemas:
        combined = [keyword for keyword in (*_LISTS, "$ref") if keyword in one]
        several = len(combined) > 1 or bool(combined and _OF_OBJECTS & one.keys())
        if several or _count(one.get("allOf")) > 1:
            pending += _in_place(one, references)
    return _reached(pending, lambda one: _in_place(one, references))


def compared(
    schemas: list[dict[str, Any]], references: References, beside: set[int]
) -> tuple[set[int], list[dict[str, Any]]]:
    """The ids of the schemas within a `oneOf` whose alternatives llguidance has to tell apart as they are (what only a
    narrower one refuses, the user's may accept, and then two of them do), and the schemas with the other `oneOf`s."""
    kept: set[int] = set()
    apart = [one for one in schemas if isinstance(one.get("oneOf"), list)]
    for _ in range(_MOST_TURNS):
        targets = {id(one): [_target(b, references) for b in one["oneOf"]] for one in apart}
        unlike = [one for one in apart if not _told_apart(targets[id(one)], kept | beside)]
        if not unlike:
            return kept, apart
        kept |= _reached([b for one in unlike for b in one["oneOf"]], lambda one: _within(one, references))
        gone = {id(one) for one in unlike}
        apart = [one for one in apart if id(one) not in gone]
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
    """The schemas that apply to the same value."""
    for keyword in _LISTS:
        yield from found if isinstance(found := schema.get(keyword), list) else ()
    if "$ref" in schema:
        yield _target(schema, references)


def _within(schema: dict[str, Any], references: References) -> Iterator[Any]:
    """All schemas inside, and those that it names."""
    yield from _in_place(schema, references)
    for keyword in ("properties", "patternProperties"):
        yield from found.values() if isinstance(found := schema.get(keyword), dict) else ()
    yield from found if isinstance(found := schema.get("prefixItems"), list) else ()
    yield schema.get("items")
    yield schema.get("additionalProperties")


def _target(schema: Any, references: References) -> Any:
    """Return the schema at the end of a chain of references."""
    for _ in range(32):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        try:
            schema = references.resolved(schema["$ref"])
        except UnknownReference:
            break
    return schema


def _told_apart(branches: list[Any], whole: set[int]) -> bool:
    """Whether no value that one branch allows, closed, is valid under another, open. `whole`: not to be closed."""
    if len(branches) > _MOST_BRANCHES or not all(isinstance(one, dict) for one in branches):
        return False
    if len({id(one) for one in branches} - whole) < len(branches):
        return False
    return all(_apart(one, other) for one in branches for other in branches if one is not other)


def _apart(closed: dict[str, Any], other: dict[str, Any]) -> bool:
    if not _types(closed) & _types(other):
        return True
    if not closable(closed) or _types(closed) & _types(other) != {"object"}:
        return False
    required = other.get("required")
    wanted = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
    if any(name not in closed["properties"] for name in wanted):
        return True
    marks = [name for name in wanted if name in closed.get("required", ())]
    return any(_marked_apart(closed["properties"][name], other.get("properties"), name) for name in marks)


def _marked_apart(mark: Any, properties: Any, name: str) -> bool:
    """Whether a property that both require has other texts in one than in the other."""
    texts, others = _texts(mark), _texts(properties.get(name) if isinstance(properties, dict) else None)
    return bool(texts and others) and texts.isdisjoint(others)


def _texts(schema: Any) -> set[str]:
    """The texts that a `const` or `enum` lists; none for what allows other values."""
    if not isinstance(schema, dict):
        return set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    listed = isinstance(values, list) and all(isinstance(one, str) for one in values)
    return set(values) if listed else set()


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that it allows, whole numbers as numbers."""
    if "type" not in schema:
        return set(_TYPES)
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else str(name) for name in named}


def _count(found: Any) -> int:
    return len(found) if isinstance(found, list) else 0
