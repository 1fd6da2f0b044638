"""Regression tests of keywords, numbers, names and formats of JSON Schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.constraints.grammar import BadConstraint, check_grammar
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.prompts.sampling_fields import override
from batchinfer.input.rows import RowProblem
from tests.batchinfer.input.constraints.random_schemas import accepts, compiled

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": True}
MARKED = [
    {"type": "object", "properties": {"k": {"const": n}, "n": part}, "required": ["k", "n"]}
    for n, part in enumerate(
        [{"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, {"type": "null"}]
    )
]


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "no whole number"),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**64}, "beyond 9223372036854774784"),
    ({"type": "number", "exclusiveMaximum": -(2**63)}, "beyond -9223372036854774784"),
    ({"const": 120.88995980580641}, "more digits"),
    ({"type": "number", "multipleOf": 0.07}, "multipleOf has more digits"),
    ({"allOf": [{"type": "integer", "multipleOf": 4294967}, {"multipleOf": 4294965}]}, "least common multiple"),
    ({"prefixItems": [{"type": "integer"}], "additionalItems": False}, "write items instead"),
    ({"prefixItems": [{"type": "integer"}], "items": [True]}, "in addition to prefixItems"),
    ({"$schema": DRAFT_7, "prefixItems": [{"type": "integer"}]}, "prefixItems has no effect"),
    ({"$schema": DRAFT_7, "$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "next to a \\$ref"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "in place of minimum"),
    ({"type": "string", "nullable": True}, "add null to the type"),
    ({"type": "integer", "divisibleBy": 3}, "write multipleOf"),
    ({"type": "string", "maxlength": 3}, "did you mean maxLength"),
    ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 9}], "x-guidance": {"coerce_one_of": True}}, "oneOf"),
    ({"$ref": "#/x/y", "x": {"y": {"type": "integer", "not": {}}}}, "not"),
    ({"$defs": {"a": {"$id": "b", "$ref": "#/$defs/c"}}, "$ref": "#/$defs/a"}, "its own \\$id"),
    ({"enum": []}, "enum is an empty list"),
    ({"type": []}, "type is an empty list"),
    ({"anyOf": []}, "anyOf is an empty list"),
    ({**OPEN, "properties": {"a": {"enum": ["\x01"]}}}, "control character"),
    ('{"type": "integer", "type": "string"}', "'type' twice"),
    ('{"const": NaN}', "NaN"),
    ('{"const": 1e99999999999999999999}', "exponent"),
    ('{"const": "\\ud800"}', "surrogate"),
    ({"oneOf": MARKED[:1], "maximum": "x"}, "maximum"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(schema: Any, words: str) -> None:
    said = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(BadConstraint, match=words):
        check_grammar(SamplingParams(json_schema=said))


@pytest.mark.parametrize("keywords", [
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True}},
    {"dependencies": {}},
    {"not": False},
    {"if": {"type": "null"}},
    {"then": {"type": "null"}},
    {"contains": {"type": "null"}, "minContains": 0},
    {"propertyNames": {}},
    {"unevaluatedProperties": True},
    {"additionalItems": False},
    {"exclusiveMinimum": False},
    {"nullable": False},
    {"x-ours": {"type": "null"}, "title2": 3},
    {"allOf": []},
    {"minItems": 0.0},
])  # fmt: skip
def test_keywords_that_ask_for_nothing_are_accepted(keywords: dict[str, Any]) -> None:
    assert accepts(compiled({"type": ["array", "boolean"], **keywords}), "true")


@pytest.mark.parametrize(("schema", "right", "wrong"), [
    ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 3}, ["9007199254740994"], ["9007199254740996"]),
    ({"type": "integer", "maximum": 10**18 + 1, "minimum": 10**18 - 1}, ["1000000000000000000"], ["0"]),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.99999999999999", "-3"], ["0.99999999999999999999999", "1"]),
    ({"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}, ["5.1", "5.5"], ["5", "5.0", "5." + "0" * 20 + "1"]),
    ('{"type": "number", "maximum": 0.99999999999999999999}', ["0.5", "0.98"], ["1", "1.0"]),
    ({"type": "number", "maximum": 0.36712383142708804}, ["0.35", "0.366"], ["0.3671238314270881"]),
    ({"type": "number", "maximum": 1e300}, ["12345.5"], []),
    ({"oneOf": MARKED}, ['{"k": 0, "n": 9007199254740994}'], ['{"k": 0, "n": 9007199254740992}']),
    ({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}}, ["[1]", "[1, null]"], ["[null]"]),
    (OPEN, ['{"a": true, "b": 5}'], ['{"a": true, "\\u0061": 5}', '{"\\u0061": 5}', '{"b": "\\ud800"}']),
    ({"$ref": "#/x/y", "x": {"y": {"type": "integer", "maximum": 2**53 + 1}}}, ["1"], ["9007199254740993"]),
    ({"enum": ["\x01", "\x7f"]}, ['"\\u0001"', '"\\u007f"'], ['"\\u0061"']),
    ({**OPEN, "required": ["\x1f"]}, ['{"\\u001f": 1}'], ['{"\\u001f": 1, "\\u001F": 1}', '{"\\u001F": 1}']),
    ({"type": "string", "maxLength": 1}, ['"😀"'], ['"\\ud83d\\ude00"', '"ab"']),
    ({"type": "string", "format": "email"}, ['"a@b.c"'], [f'"{"a" * 65}@b.c"', f'"a@{"b" * 64}.c"']),
    ({"type": "string", "format": "hostname"}, ['"b.c"'], [f'"{"b." * 127}c"']),
])  # fmt: skip
def test_answers_are_those_that_are_valid(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(schema)
    found = {text: accepts(grammar, text) for text in (*right, *wrong)}
    assert found == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)


DAYS = ["2024-02-29", "2000-02-29", "0004-02-29", "9999-12-31", "0001-01-01"]
NO_DAYS = ["2023-02-29", "1900-02-29", "0000-01-01", "0000-02-29", "2024-02-30", "2024-04-31", "2024-13-01"]


@pytest.mark.parametrize("more", [{}, {"pattern": "^[0-9]"}], ids=["", "pattern"])
@pytest.mark.parametrize(("form", "end"), [("date", ""), ("date-time", "T10:00:00Z")])
def test_days_are_those_of_the_calendar(form: str, end: str, more: dict[str, str]) -> None:
    schema = {"type": "string", "format": form, **more}
    grammar = compiled(schema)
    assert [day for day in DAYS + NO_DAYS if accepts(grammar, f'"{day}{end}"')] == DAYS


@pytest.mark.parametrize(("time", "fits"), [
    ("23:59:60Z", False),
    ("23:59:59.123456+23:59", True),
    ("10:00:00.1234567Z", False),
    ("10:00:00", False),
])  # fmt: skip
def test_times_are_those_of_a_column(time: str, fits: bool) -> None:
    for form, text in (("time", time), ("date-time", f"2024-02-29T{time}")):
        grammar = compiled({"type": "string", "format": form, "pattern": ":"})
        assert accepts(grammar, f'"{text}"') is fits
    assert not accepts(compiled({"type": "string", "format": "date-time"}), '"0001-01-01T00:00:00+00:01"')


@pytest.mark.parametrize("own", [
    {"choice": []},
    {"choice": [""]},
    {"choice": ["a", None]},
    {"regex": ""},
    {"grammar": ""},
    {"json_schema": ""},
])  # fmt: skip
@pytest.mark.parametrize("of_the_job", [SamplingParams(), SamplingParams(regex="x")])
def test_a_row_with_an_empty_constraint_is_an_error(of_the_job: SamplingParams, own: dict[str, Any]) -> None:
    with pytest.raises(RowProblem, match=next(iter(own))):
        override(of_the_job, own)
    assert override(of_the_job, dict.fromkeys(own)) == of_the_job


def test_numbers_of_a_schema_keep_their_digits() -> None:
    assert str(parsed_schema('{"maximum": 0.12345678901234567890}')["maximum"]) == "0.12345678901234567890"
    with pytest.raises(BadSchema, match="not JSON"):
        parsed_schema("{")
