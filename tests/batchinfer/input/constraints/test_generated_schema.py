"""The narrower schema for generation, and invalid schemas."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.generated_schema import generated_schema, subschemas
from batchinfer.input.constraints.grammar import BadConstraint, check_grammar
from batchinfer.input.constraints.narrow_values import DIGITS
from batchinfer.input.constraints.patterns.schemas import translate_patterns
from batchinfer.input.prompts.keys import CONSTRAINT_RULES

MALFORMED: list[Any] = [
    {"type": "string", "format": {}},
    {"type": "string", "format": ["date"]},
    {"properties": {"a": {}}, "required": [["a"]]},
    {"properties": {"a": {}}, "required": [{}]},
    {"type": ["integer", 3]},
    {"type": "integer", "minimum": "x"},
    {"properties": 3},
    {"anyOf": 3},
    {"oneOf": 3},
    {"oneOf": [{"properties": {"a": {}}, "required": 3}, {"properties": {"a": {}}, "required": 3}]},
    {"type": "string", "pattern": 3},
    {"patternProperties": 3},
    {"allOf": [3, 4]},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_a_malformed_schema_is_refused(schema: Any) -> None:
    with pytest.raises(BadConstraint, match="json_schema"):
        check_grammar(SamplingParams(json_schema=json.dumps(schema)))


@pytest.mark.parametrize("kinds", ["integer", ["integer", "null"], ["null", "integer", "string"]], ids=str)
def test_integers_have_bounds_that_a_column_holds(kinds: Any) -> None:
    narrow = generated_schema({"type": kinds})
    assert 10 ** (DIGITS - 1) < narrow["maximum"] == int(float(narrow["maximum"])) < 10**DIGITS
    assert narrow["minimum"] == -narrow["maximum"]


def test_numbers_have_no_bounds() -> None:
    schema = {"type": ["integer", "number"]}
    assert generated_schema(schema) == schema


ALIKE: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a"]},
    {"properties": {"a": {"properties": {"b": {}}}, "c": {"additionalProperties": True, "properties": {"d": {}}}}},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 2**60},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 1.25},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time", "maxLength": 100},
    {"type": "string", "format": "of ours"},
    {"type": "string", "pattern": '^[^"]+[^x]$'},
    {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}]},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"properties": {"a": {"enum": [1]}}}}},
]  # fmt: skip
RULES = {2: "f262d9ba0bc29b9a12ce96482455f5b82efb4ed5646deb31be019ffae3ac488f"}


def test_a_change_of_the_rules_has_a_version() -> None:
    """Answers that were stored under other rules may be invalid: see CONSTRAINT_RULES. Add the new digest
    here, with another version if answers must be generated again."""
    schemas = [generated_schema(one) for one in ALIKE]
    for one in schemas:
        translate_patterns(subschemas(one))
    narrow = json.dumps(schemas, sort_keys=True)
    assert sha256(narrow.encode()).hexdigest() == RULES[CONSTRAINT_RULES]
