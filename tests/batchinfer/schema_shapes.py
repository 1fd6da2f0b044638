"""Schemas for each feature of JSON Schema (draft 2020-12) that constraints support, with expected answers."""

from __future__ import annotations

from typing import Any

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x"],
}


def whole(required: bool = True, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties."""
    made: dict[str, Any] = {"type": "object", "properties": properties}
    return {**made, "required": list(properties)} if required else made


def text(form: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "format": form, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "types": whole(a={"type": "string", "maxLength": 6}, b={"type": "integer"}, c={"type": "number"},
        d={"type": "boolean"}, e={"type": "null"}),
    "type lists": whole(a={"type": ["integer", "boolean"]}, b={"type": ["string", "null"], "maxLength": 4},
        c={"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 2},
        d={"type": ["number", "integer"]}),
    "optional": whole(required=False, a={"type": "boolean"}, b={"type": "integer", "minimum": 0}, c={"const": "c"}),
    "required of none": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "z"],
        "additionalProperties": {"type": "boolean"}},
    "closed": {**whole(a={"type": "integer"}), "additionalProperties": False},
    "open": {**whole(a={"type": "boolean"}), "additionalProperties": True},
    "others of a schema": {**whole(required=False, a={"type": "string", "maxLength": 3}),
        "additionalProperties": {"type": "integer", "minimum": -9, "maximum": 9}},
    "pattern properties": {"type": "object", "properties": {"b": {"type": "boolean"}},
        "patternProperties": {"^n_[a-z]$": {"type": "integer"}, "^t_[a-z]$": {"type": "string", "maxLength": 2}},
        "additionalProperties": False, "required": ["b"]},
    "items": whole(a={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        b={"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
        c={"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}),
    "first items": whole(a={"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False}, b={"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 2,
        "maxItems": 4}),
    "enums": whole(a={"enum": ["red", "green", 'b"l\\ue', "ä😀", "with space", ""]}, b={"enum": [1, -2, 30]},
        c={"enum": [1, 2.5, 1e-7, -3e15]}, d={"enum": [True, None]}, e={"enum": ["x", 1, None, True]},
        f={"enum": [{"k": [1, "a"]}, [], {}]}),
    "consts": whole(a={"const": "é\n\t"}, b={"const": 9007199254740991}, c={"const": -0.5}, d={"const": None},
        e={"const": {"x": [1, {}]}}),
    "bounds": whole(a={"type": "integer", "minimum": -3, "maximum": 120},
        b={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
        c={"type": "number", "minimum": 0, "maximum": 1}, d={"type": "number", "exclusiveMinimum": -1.5,
        "exclusiveMaximum": 2.25}, e={"type": "integer", "minimum": 1000000}, f={"type": "integer", "maximum": -7}),
    "multiples": whole(a={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
        b={"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
        c={"type": "integer", "multipleOf": 1000}),
    "lengths": whole(a={"type": "string", "minLength": 2, "maxLength": 5}, b={"type": "string", "maxLength": 0},
        c={"type": "string", "minLength": 3, "maxLength": 3}),
    "patterns": whole(a={"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
        b={"type": "string", "pattern": "^(foo|ba[rz])", "maxLength": 5},
        e={"type": "string", "pattern": "[0-9]", "maxLength": 3}, c={"type": "string", "pattern": "^\\w+\\s?\\S$",
        "maxLength": 8}, d={"type": "string", "pattern": '^[^a-z"]{1,4}$'}),
    "dates": whole(a=text("date"), b=text("time"), c=text("date-time")),
    "other formats": whole(a=text("duration"), b=text("ipv4"), c=text("ipv6"), d=text("uuid")),
    "addresses": whole(a=text("email"), b=text("hostname")),
    "links": whole(a=text("uri")),
    "formats unknown to the library": whole(a=text("regex", pattern="^[a-z]{3}$"), b=text("colour", maxLength=3)),
    "anyOf": whole(a={"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
        b={"anyOf": [{"type": "null"}, PLACE]}, c={"anyOf": [whole(k={"const": "one"}, n={"type": "integer"}),
        whole(k={"const": "two"}, t={"type": "boolean"})]}),
    "oneOf": whole(a={"oneOf": [{"type": "integer"}, {"type": "null"}]},
        b={"oneOf": [whole(k={"const": 1}, n={"type": "integer"}), whole(k={"const": 2}, t={"type": "boolean"})]}),
    "allOf": whole(a={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 90}]},
        b={"allOf": [{"$ref": "#/$defs/short"}], "description": "as Pydantic writes it"},
        c={"allOf": [{"type": "object", "properties": {"p": {"type": "boolean"}}, "required": ["p"]},
        {"properties": {"q": {"type": "integer"}}, "required": ["q"]}]}) | {"$defs": {"short": {"type": "string",
        "maxLength": 2}}},
    "allOf of the whole": {"allOf": [whole(a={"type": "integer"}), whole(b={"type": "string", "maxLength": 4})],
        "type": "object", "properties": {"c": {"type": "boolean"}}},
    "references": {**whole(a={"$ref": "#/$defs/place"}, b={"type": "array", "items": {"$ref": "#/$defs/place"},
        "maxItems": 2}, c={"$ref": "#/$defs/a~1b%20c"}), "$defs": {"place": PLACE, "a/b c": {"enum": ["s", "t"]}}},
    "references beside keywords": {**whole(a={"$ref": "#/$defs/n", "maximum": 50},
        b={"$ref": "#/$defs/n", "description": "d"}), "$defs": {"n": {"type": "integer", "minimum": 4}}},
    "recursion": {**whole(root={"$ref": "#/$defs/tree"}), "$defs": {"tree": TREE}},
    "the whole again": {"type": "object", "properties": {"v": {"type": "boolean"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["v", "next"]},
    "nullable": whole(a={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        b={"type": ["integer", "null"]}, c={"enum": ["x", "y", None]},
        d={"oneOf": [{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"type": "null"}]}),
    "nested": whole(a=whole(b=whole(c=whole(d={"type": "array", "items": PLACE, "maxItems": 2}))),
        e={"type": "array", "items": whole(required=False, f={"type": "array", "items": {"enum": [1, 2]},
        "maxItems": 2}), "maxItems": 2}),
    "keys": whole(**{'a "quoted" key': {"type": "boolean"}, "with space": {"type": "integer"},
        "ключ": {"const": "да"}, "😀": {"type": "null"}, "back\\slash": {"type": "boolean"},
        "line\nend": {"type": "boolean"}, "a/b~c%": {"type": "boolean"}, "'; drop table--": {"type": "boolean"}}),
    "any value": whole(a={}, b=True),
    "bounded objects": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1,
        "maxProperties": 2},
}  # fmt: skip

INTEGER, BOOLEAN, NUMBER = {"type": "integer"}, {"type": "boolean"}, {"type": "number"}


def matching(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **more}


# Small schemas. For each, a generated answer could be invalid under the schema
EDGES: dict[str, dict[str, Any]] = {
    "anyOf beside properties": {**whole(a=INTEGER), "anyOf": [{"properties": {"b": BOOLEAN}, "required": ["b"]},
        {"properties": {"c": BOOLEAN}, "required": ["c"]}]},
    "properties next to a reference": {"$ref": "#/$defs/base", "properties": {"x": BOOLEAN}, "required": ["x"],
        "$defs": {"base": whole(y=INTEGER)}},
    "oneOf, each requires its own": {"oneOf": [whole(a=INTEGER), whole(b=INTEGER)]},
    "oneOf with a mark": {"oneOf": [whole(k={"const": "a"}, v=INTEGER), whole(k={"enum": ["b", "c"]}, v=BOOLEAN)]},
    "names of unnamed properties": {"type": "object", "patternProperties": {"^[ab]$": BOOLEAN},
        "additionalProperties": False, "minProperties": 1, "maxProperties": 3},
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "54 bits": {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53 + 1},
    "bounds of fractions": {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3.0},
    "integer or null": {"type": ["integer", "null"]},
    "from 0 exclusively": {**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
    "to 0 exclusively": {**NUMBER, "exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
    "from 5 exclusively": {**NUMBER, "exclusiveMinimum": 5, "maximum": 5.5},
    "tiny": {**NUMBER, "minimum": 1e-9, "maximum": 2e-9},
    "no type, properties": {"properties": {"a": INTEGER}},
    "no type, items": {"items": INTEGER, "maxItems": 2},
    "enum with a type": {"type": "integer", "enum": [1, "a", 2.5, 3.0]},
    "enum with a bound": {"enum": [1, 5, 9], "minimum": 4},
    "date of a pattern": text("date", pattern="^2"),
    "no quotes": matching('^[^a-z"]{1,4}$'),
    "no backslashes": matching(r"^[^\\a]{1,4}$"),
    "neither, in a name": {"type": "object", "patternProperties": {r'^[^"\\]$': {"type": "null"}},
        "additionalProperties": False},
    "escapes": matching(r'^[\\"/\n]{2}$'),
    "control characters": matching(r"^[\x00-!]{1,3}$"),
    "one of two patterns": matching("^a$|^b", maxLength=3),
    "allOf of patterns": {"allOf": [matching("^a"), {"pattern": "z$"}, {"maxLength": 3}]},
    "allOf of multiples": {"allOf": [{**INTEGER, "multipleOf": 4, "minimum": 1}, {"multipleOf": 6, "maximum": 99}]},
    "allOf of items": {"allOf": [{"type": "array", "items": INTEGER, "minItems": 1},
        {"items": {"minimum": 3, "maximum": 5}, "maxItems": 2}]},
    "allOf of anyOf": {"allOf": [{"anyOf": [{"type": "string", "maxLength": 3}, INTEGER]},
        {"anyOf": [{"type": "string", "minLength": 3}, {"maximum": 3}]}]},
    "required, not named": {"type": "object", "required": ["q w", 'e"r'], "additionalProperties": BOOLEAN},
    "a property that cannot be": {"type": "object", "properties": {"a": False, "b": BOOLEAN}, "required": ["b"]},
    "no items": {"type": "array", "items": False},
    "some first items": {"type": "array", "prefixItems": [INTEGER, BOOLEAN], "items": False, "minItems": 1},
    "an anchor": {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "boolean"}}},
    "recursion without bounds": {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [INTEGER,
        {"type": "array", "items": {"$ref": "#/$defs/n"}}]}}},
    "oneOf of references": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {"cat": whole(kind={"const": "cat"}, lives=INTEGER),
        "dog": whole(kind={"const": "dog"}, tricks={"type": "array", "items": BOOLEAN, "maxItems": 2})}},
    "an object or a text": {"oneOf": [{"$ref": "#/$defs/o"}, {"type": "string", "maxLength": 2}],
        "$defs": {"o": whole(a=INTEGER)}},
}  # fmt: skip
# Constraints cannot separate valid answers from invalid ones: words of the error
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an integer of 54 bits": ({"const": 2**53 + 1}, "const"),
    "a float without digits": ({"enum": [1, 1e300]}, "enum"),
    "one inside": ({"enum": [{"a": [2**60 + 1]}]}, "enum"),
    "a bound without end": ({"type": "number", "minimum": 10**400}, "a bound"),
    "two unnamed properties": ({"type": "object", "patternProperties": {"^[ab]$": BOOLEAN}, "minProperties": 2},
        "minProperties"),
    "oneOf of open objects": ({"oneOf": [whole(a=INTEGER), {"type": "object", "properties": {"b": INTEGER}}]},
        "oneOf"),
    "oneOf within properties": ({"oneOf": [whole(k={"type": "object", "properties": {"a": INTEGER}}),
        whole(k=whole(b=INTEGER))]}, "oneOf"),
    "oneOf of integers": ({"oneOf": [INTEGER, {**INTEGER, "minimum": 10**18}]}, "oneOf"),
    "an unknown keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "look-ahead": (matching("^(?!a)b"), "look-ahead"),
}  # fmt: skip
