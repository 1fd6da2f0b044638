"""Tests the messages about wrong constraints: each names the place and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar import BadConstraint, check_grammar


def of(**properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties})


DEEP = {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "strng"}}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": of(a={"type": "strng"})}, "properties.a: 'strng' is no type; did you mean string?"),
    ({"json_schema": of(x={}, a=DEEP)}, "properties.a.items.properties.b: 'strng' is no type; did you mean string?"),
    ({"json_schema": '{"type": "text"}'}, "'text' is no type; there are object, array, string, integer, number"),
    ({"json_schema": of(a={"pattern": "(?<=a)b"})},
        "properties.a: pattern: (?<= at character 1 is look-ahead or look-behind"),
    ({"json_schema": of(a={"pattern": "(a"})},
        "properties.a: pattern: ( at character 1 is not closed; write ) at its end"),
    ({"json_schema": of(a={"$ref": "#/$defs/no"})},
        "properties.a: its $ref '#/$defs/no' names nothing in the schema; correct it"),
    ({"json_schema": of(a={"$ref": "http://a/b"})}, "properties.a: its $ref 'http://a/b"),
    ({"json_schema": of(a={"uniqueItems": True})}, 'properties.a: "uniqueItems" cannot be followed; remove it'),
    ({"json_schema": of(a={"oneOf": [{"minimum": 1}, {"maximum": 9}]})},
        "properties.a: the alternatives of its oneOf"),
    ({"json_schema": of(a={"const": 10**22 + 1})}, "properties.a: const has a number with more digits"),
    ({"json_schema": "false"}, "the schema is false, which no answer can follow; write what answers look like"),
    ({"json_schema": "{"}, "the schema is not JSON"),
    ({"json_schema": "[" * 99}, "the schema's lists and objects are nested more than 64 deep"),
    ({"regex": "(a"}, "( at character 1 is not closed; write ) at its end"),
    ({"regex": "(?=a)"}, "(?= at character 1 is look-ahead or look-behind, which cannot be followed"),
    ({"regex": "(a)\\1"},
        "\\1 at character 4 refers to a group, which cannot be followed; write the group's expression again"),
    ({"regex": "(" * 30_000}, "more than 200 of its brackets are open at once"),
    ({"grammar": "start: no"}, "line 1: there is no rule named no; add it or correct the name"),
    ({"grammar": 'begin: "a"'}, "it has no rule named start, where an answer begins; name one so"),
    ({"grammar": 'start: "a'}, "line 1, column 10: this is not understood; is a quote not closed?"),
    ({"grammar": 'x: "a"\nstart "a"'}, "line 2, column 7: Expected token ':'"),
    ({"grammar": "root ::= no"}, "it has no rule named no, which another one uses; add it or correct the name"),
    ({"grammar": 'x ::= "a"'}, "it has no rule named root, where an answer begins; name one so"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "words"), WRONG, ids=[words[:60] for _, words in WRONG])
def test_a_wrong_constraint_is_reported_with_its_place_and_remedy(said: dict[str, Any], words: str) -> None:
    params = SamplingParams(**said)
    with pytest.raises(BadConstraint) as refused:
        check_grammar(params)
    assert str(refused.value).startswith(f"{params.constraint}: {words}")


def test_the_schema_true_is_any_json() -> None:
    check_grammar(SamplingParams(json_schema="true"))
