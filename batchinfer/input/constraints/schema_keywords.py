"""Rewrites a JSON Schema in the keywords of draft 2020-12 that llguidance supports.

llguidance guesses the draft from the keywords, reads options from the schema (`x-guidance`), and ignores what it does
not know. Therefore only supported keywords are copied. Keywords of older drafts are translated if they have an exact
equivalent. An unsupported keyword is rejected if it has an effect, and omitted if it has none, such as
`uniqueItems: false`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batchinfer.input.constraints.exact_numbers import is_number
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.constraints.schema_references import References, UnknownReference

MOST_SCHEMAS = 50_000  # llguidance's own limit
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PLAIN = frozenset(
    ("type", "const", "enum", "required", "pattern", "format", "multipleOf", *_BOUNDS, *_COUNTS)
)
_SINGLE = frozenset(("items", "additionalProperties"))
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties"))
# llguidance reads these as groups, so no other keyword may be between them
_TOGETHER = (("properties", "patternProperties", "additionalProperties"), ("prefixItems", "items"))
_NOTHING: tuple[Any, ...] = (True, {})  # schemas that allow everything
_DRAFT = re.compile(r"draft-0?(\d)\b|/draft/(2019-09)/")
_WITHOUT_SIBLINGS = ("4", "6", "7")  # drafts in which a $ref must not have other keywords next to it
_COPY = "only this document is read, so copy the part into $defs and refer to it there"
_ADVICE = {
    "nullable": "it is OpenAPI's; add null to the type, as in [string, 'null']",
    "dependencies": "it is an older draft's; write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "additionalItems": "it has no effect with prefixItems; write items instead",
    "divisibleBy": "it is an older draft's; write multipleOf",
    "extends": "it is an older draft's; write allOf",
    "disallow": "it is an older draft's; write the types that are allowed",
}


def followed_schema(schema: Any) -> Any:
    """Return a copy of a parsed JSON Schema that has only keywords which llguidance supports.

    Unsupported keywords without an effect are removed.

    Raises:
        BadSchema: The schema has an unsupported keyword with an effect, or an unknown one that looks misspelled.
    """
    return _KeywordReader(schema).whole()


def _has_no_effect(keyword: str, schema: Mapping[str, Any], old: str | None) -> bool:
    found = _TRIVIAL.get(keyword)
    return found is not None and found(schema[keyword], schema, old)


def _empties(value: Any, empty: tuple[Any, ...]) -> bool:
    return isinstance(value, dict) and all(one in empty and one is not False for one in value.values())


_TRIVIAL: Mapping[str, Callable[[Any, Mapping[str, Any], str | None], bool]] = {
    "not": lambda value, *_: value is False,
    "if": lambda _, schema, __: all(schema.get(name, True) in _NOTHING for name in ("then", "else")),
    "then": lambda value, schema, _: "if" not in schema or value in _NOTHING,
    "else": lambda value, schema, _: "if" not in schema or value in _NOTHING,
    "contains": lambda _, schema, old: (
        old is None and schema.get("minContains") == 0 and "maxContains" not in schema
    ),
    "propertyNames": lambda value, *_: value in _NOTHING,
    "uniqueItems": lambda value, schema, _: value is False or schema.get("maxItems") in (0, 1),
    "unevaluatedItems": lambda value, *_: value in _NOTHING,
    "unevaluatedProperties": lambda value, *_: value in _NOTHING,
    "dependentSchemas": lambda value, *_: _empties(value, _NOTHING),
    "dependentRequired": lambda value, *_: _empties(value, ([],)),
    "dependencies": lambda value, *_: _empties(value, (*_NOTHING, [])),
    "additionalItems": lambda _, schema, __: "prefixItems" not in schema,
    "nullable": lambda value, *_: value is not True,
    "divisibleBy": lambda *_: False,
    "extends": lambda *_: False,
    "disallow": lambda *_: False,
    "$dynamicRef": lambda *_: False,
    "$recursiveRef": lambda *_: False,
}
_FOLLOWED = frozenset((*_PLAIN, *_SINGLE, *_LISTS, *_NAMED, "$ref"))
_SPELLINGS = {name.lower(): name for name in (*_FOLLOWED, *_TRIVIAL)}


class _KeywordReader:
    def __init__(self, root: Any) -> None:
        self._root, self._references = root, References(root)
        self._old = _older_draft(root)
        self._embedded = set(_embedded(root))
        self._names: dict[int, str] = {id(root): "#"}
        self._pending: list[tuple[str, Any]] = []
        self._count = 0

    def whole(self) -> Any:
        if self._old == "3":
            raise BadSchema("its $schema names draft 3, which is not read; write it as draft 2020-12")
        made, named = self._schema(self._root), {}
        while self._pending:
            name, one = self._pending.pop()
            named[name] = self._schema(one)
        return {**made, "$defs": named} if named else made

    def _schema(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise BadSchema(
                "it has another value where a schema must be; a schema is an object, true or false"
            )
        self._count += 1
        if self._count > MOST_SCHEMAS:
            raise BadSchema(
                f"it has more than {MOST_SCHEMAS} schemas, including referenced ones; make it smaller"
            )
        if "$ref" in schema:
            self._check_beside_reference(schema)
        current = self._in_current_keywords(schema)
        made: dict[str, Any] = {}
        for keyword in _in_order(current):
            if keyword in _FOLLOWED:
                made[keyword] = self._value(keyword, current[keyword])
            else:
                self._check_left_out(keyword, current)
        return made

    def _value(self, keyword: str, value: Any) -> Any:
        if keyword == "$ref":
            return self._reference(value)
        if keyword in ("enum", "type", "anyOf", "oneOf") and value == []:
            raise BadSchema(f"{keyword} is an empty list, which no answer can match; list the allowed values")
        if keyword in _SINGLE:
            return self._schema(value)
        if keyword in _LISTS and isinstance(value, list):
            return [self._schema(one) for one in value]
        if keyword in _NAMED and isinstance(value, dict):
            return {name: self._schema(one) for name, one in value.items()}
        if keyword in _COUNTS and is_number(value) and -(2**63) < value < 2**63 and value == int(value):
            return int(value)
        return value  # llguidance reports errors in the values

    def _check_left_out(self, keyword: str, schema: Mapping[str, Any]) -> None:
        if keyword in _TRIVIAL and not _has_no_effect(keyword, schema, self._old):
            advice = _ADVICE.get(keyword, "remove it, and check the answers for it afterwards")
            raise BadSchema(f'"{keyword}" cannot be followed; {advice}')
        plain = keyword.replace("_", "").replace("-", "").lower()
        if keyword not in _TRIVIAL and (meant := _SPELLINGS.get(plain)) is not None:
            raise BadSchema(f"{keyword[:40]} is no keyword; did you mean {meant}?")

    def _in_current_keywords(self, schema: dict[str, Any]) -> dict[str, Any]:
        current = dict(schema)
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if current.get(name) is True:
                inclusive = name.replace("exclusiveM", "m")
                raise BadSchema(
                    f"{name}: true is an older draft's; give it the number, in place of {inclusive}"
                )
            if current.get(name) is False:
                del current[name]
        if isinstance(current.get("required"), bool):
            raise BadSchema(
                "required: true is an older draft's; give the object a list of the names it requires"
            )
        if "prefixItems" in current and self._old is not None:
            raise BadSchema("prefixItems has no effect in the draft that its $schema names; remove $schema")
        if isinstance(current.get("items"), list):
            return _with_first_items(current)
        return current

    def _check_beside_reference(self, schema: Mapping[str, Any]) -> None:
        if id(schema) in self._embedded:
            raise BadSchema(
                "a $ref is in a part with its own $id, which changes its meaning; remove that $id"
            )
        if self._old in _WITHOUT_SIBLINGS and (_FOLLOWED - {"$ref"}) & schema.keys():
            raise BadSchema(
                "keywords next to a $ref have no effect in the draft that its $schema names; remove $schema, or put "
                "the $ref and the other keywords into an allOf"
            )

    def _reference(self, reference: Any) -> str:
        try:
            found = self._references.resolve(reference)
        except UnknownReference as error:
            inside = isinstance(reference, str) and reference.startswith("#")
            right = "correct it or add the part" if inside else _COPY
            raise BadSchema(f"{error}; {right}") from None
        if id(found) not in self._names:
            name = f"d{len(self._names)}"
            self._names[id(found)] = f"#/$defs/{name}"
            self._pending.append((name, found))
        return self._names[id(found)]


def _with_first_items(schema: dict[str, Any]) -> dict[str, Any]:
    if "prefixItems" in schema:
        raise BadSchema(
            "items is a list in addition to prefixItems; give items one schema, for the items after the first ones"
        )
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "items":
            made["prefixItems"] = value
        elif keyword == "additionalItems":
            made["items"] = value
        else:
            made[keyword] = value
    return made


def _in_order(schema: Mapping[str, Any]) -> list[str]:
    # llguidance reads some keywords as a group, so these must be adjacent
    found: dict[str, None] = {}
    for keyword in schema:
        for together in _TOGETHER:
            if keyword in together:
                found.update(dict.fromkeys(one for one in together if one in schema))
        found[keyword] = None
    return list(found)


def _older_draft(root: Any) -> str | None:
    """Return the draft that `$schema` of a document names if it is older than 2020-12, such as "7", else None."""
    name = root.get("$schema") if isinstance(root, dict) else None
    found = _DRAFT.search(name) if isinstance(name, str) else None
    return None if found is None else found[1] or found[2]


def _embedded(root: Any) -> Iterator[int]:
    # References in a subschema with its own `$id` are relative to that `$id`
    pending = [(root, False)]
    while pending:
        one, inside = pending.pop()
        if isinstance(one, dict):
            inside = inside or (one is not root and _names_a_document(one))
            if inside:
                yield id(one)
            pending.extend((value, inside) for value in one.values())
        elif isinstance(one, list):
            pending.extend((value, inside) for value in one)


def _names_a_document(schema: Mapping[str, Any]) -> bool:
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")
