"""Tests bounds of answers: no valid value is written longer, and the error names the part without a bound."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.input.constraints.answer_bound import UnboundedAnswer, most_tokens
from batchinfer.input.constraints.patterns.width import NoWidth, in_json, pattern_width, plain
from tests.batchinfer.input.constraints.random_schemas import accepts, compiled
from tests.examples import examples

Case = tuple[dict[str, Any], st.SearchStrategy[Any]]  # a bounded schema, and values that are valid under it
CHARACTERS = st.characters(codec="utf-8")
MOST = 999_999_999_999_999_872  # 18 digits, exact as a 64-bit float
TEXTS = st.text(CHARACTERS, max_size=4)


def bytes_of(schema: Any) -> int:
    return most_tokens(SamplingParams(json_schema=json.dumps(schema))) - 1


def written(value: Any) -> str:
    """Return the value as the engine writes it, with escapes only where necessary."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(k)}: {written(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


@st.composite
def integers(draw: st.DrawFn) -> Case:
    low, high = sorted(draw(st.lists(st.integers(-(2**53), 2**53), min_size=2, max_size=2)))
    bounds = [{"minimum": low}, {"maximum": high}, {"minimum": low, "maximum": high}, {}]
    given = draw(st.sampled_from(bounds))
    least, most = given.get("minimum", -MOST), given.get("maximum", MOST)
    return {"type": "integer", **given}, st.integers(least, most)


@st.composite
def numbers(draw: st.DrawFn) -> Case:
    places, low, high = draw(st.integers(0, 3)), draw(st.integers(-99, 0)), draw(st.integers(1, 9999))
    step = float(Decimal(1).scaleb(-places))
    values = st.decimals(low, high, places=places)
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}, values


def leaves() -> st.SearchStrategy[Case]:
    def strings(most: int) -> Case:
        return {"type": "string", "maxLength": most}, st.text(CHARACTERS, max_size=most)

    def listed(values: list[Any]) -> Case:
        return {"enum": values}, st.sampled_from(values)

    plain = [
        ({"type": "boolean"}, st.booleans()),
        ({"type": "null"}, st.none()),
        ({"type": "string", "format": "date"}, st.dates().map(str)),
        ({"type": "string", "format": "uuid"}, st.uuids().map(str)),
        ({"type": "string", "format": "date-time"}, st.datetimes().map(lambda t: f"{t.isoformat()}+00:00")),
        ({"type": "string", "pattern": "^[A-Z]{2,3}-\\d{4}(x|yz)?$"}, st.just("ABC-1234yz")),
        ({"type": ["integer", "null"]}, st.none() | st.integers(-MOST, MOST)),
    ]
    values = TEXTS | st.integers(-(10**9), 10**9) | st.none() | st.booleans()
    return st.one_of(
        st.sampled_from(plain),
        integers(),
        numbers(),
        st.integers(0, 6).map(strings),
        st.lists(values, min_size=1, max_size=4).map(listed),
    )


def arrays(case: Case, most: int) -> Case:
    return {"type": "array", "items": case[0], "maxItems": most}, st.lists(case[1], max_size=most)


def objects(named: dict[str, Case]) -> Case:
    schema = {"type": "object", "properties": {name: case[0] for name, case in named.items()}}
    empty = {} if named else {"additionalProperties": False}
    values = st.fixed_dictionaries({}, optional={name: case[1] for name, case in named.items()})
    return schema | empty, values.map(lambda value: {name: value[name] for name in named if name in value})


def alternatives(cases: list[Case]) -> Case:
    return {"anyOf": [schema for schema, _ in cases]}, st.one_of(*(values for _, values in cases))


BOUNDED = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.builds(arrays, inner, st.integers(0, 3)),
        st.dictionaries(TEXTS, inner, max_size=3).map(objects),
        st.lists(inner, min_size=1, max_size=3).map(alternatives),
    ),
    max_leaves=5,
)


@settings(max_examples=examples(25, 150), deadline=None)
@given(st.data())
def test_no_valid_value_is_longer_than_the_bound(data: st.DataObject) -> None:
    schema, values = data.draw(BOUNDED)
    text = written(data.draw(values))
    assert len(text.encode()) <= bytes_of(schema), (schema, text)


@pytest.mark.parametrize(("schema", "longest"), [
    ({"type": "boolean"}, "false"),
    ({"const": {"ä": [1, 2.5, None]}}, '{"ä": [1, 2.5, null]}'),
    ({"type": "integer"}, str(-MOST)),
    ({"type": ["integer", "null"]}, str(-MOST)),
    ({"type": "integer", "minimum": 7, "exclusiveMaximum": 1000}, "999"),
    ({"type": "number", "minimum": 0, "maximum": 999, "multipleOf": 0.01}, "123.25"),
    ({"type": "string", "maxLength": 2}, '"\\u0001\\u001f"'),
    ({"type": "string", "format": "date-time"}, '"2026-11-22T14:31:03.123456+00:00"'),
    ({"type": "string", "format": "time"}, '"14:31:03.123456+00:00"'),
    ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"'),
    ({"type": "string", "pattern": "^(a|bc){2}$", "maxLength": 40}, '"bcbc"'),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 3}, "[null, null, null]"),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, "[null]"),
    ({"type": "object", "properties": {'"': {"type": "null"}, "b": {"enum": [1, 22]}}}, '{"\\"": null, "b": 22}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"const": 1}, {"const": 123}]}}}, "123"),
    ({"allOf": [{"type": "string", "maxLength": 1}]}, '"\\u0007"'),
])  # fmt: skip
def test_the_bound_is_reached(schema: Any, longest: str) -> None:
    assert accepts(compiled(schema), longest)
    slack = 1 if schema.get("multipleOf") else 0
    limit = schema.get("exclusiveMaximum")
    assert len(longest.encode()) + slack >= bytes_of(schema) - (limit is not None)
    assert len(longest.encode()) <= bytes_of(schema)


@pytest.mark.parametrize(("schema", "message"), [
    ({"type": "string"}, "the answer: give maxLength"),
    ({"type": "number"}, "the answer: a number may have any number of decimals"),
    ({}, "the answer: give its type"),
    ({"type": "array", "items": {"type": "null"}}, "the answer: give maxItems"),
    ({"type": "object"}, "the answer: name its properties"),
    ({"type": "string", "pattern": "^a+$"},
        "the answer: give maxLength, or bound its pattern: a repetition has no end"),
    ({"type": "object", "properties": {"items": {"type": "array", "maxItems": 2,
        "items": {"type": "object", "properties": {"note": {"type": "string"}}}}}},
        r"^items\[\]\.note: give maxLength$"),
    ({"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "$ref": "#/$defs/n"}, "contains itself"),
    ({"type": "array", "maxItems": 10**9, "items": {"type": "string", "maxLength": 10}},
        "more than max_tokens can be"),
])  # fmt: skip
def test_what_has_no_bound_is_named(schema: Any, message: str) -> None:
    with pytest.raises(UnboundedAnswer, match=message):
        bytes_of(schema)


def test_shared_parts_are_bounded_once() -> None:
    """2^40 paths lead to the last definition."""
    for last, problem in (({"type": "null"}, "more than max_tokens"), ({"type": "string"}, "maxLength")):
        defs: dict[str, Any] = {"d40": last}
        for at in range(40):
            ref = {"$ref": f"#/$defs/d{at + 1}"}
            defs[f"d{at}"] = {"type": "array", "prefixItems": [ref, {**ref}], "items": False}
            defs[f"d{at}"]["allOf"] = [{**ref, "title": "x"}, {**ref}] if last["type"] == "string" else []
        with pytest.raises(UnboundedAnswer, match=problem):
            bytes_of({"$ref": "#/$defs/d0", "$defs": defs})


def test_bounds_of_choices_and_regexes_and_unbounded_constraints() -> None:
    assert most_tokens(SamplingParams(choice=("a", "zwölf", "no"))) == 7
    assert most_tokens(SamplingParams(regex="(yes|no), \\d{2}")) == 3 + 2 + 2 + 1
    for params in (
        SamplingParams(),
        SamplingParams(json_object=True),
        SamplingParams(grammar='start: "a"'),
        SamplingParams(regex="a*"),
        SamplingParams(regex=f"a{{{INT32_MAX // 10}}}b{{999999999}}c{{999999999}}{{9}}"),
    ):
        with pytest.raises(UnboundedAnswer):
            most_tokens(params)


PATTERNS = st.recursive(
    st.sampled_from(["a", "ä", ".", "\\d", "\\w", "\\s", "\\.", "[a-f]", "[^x]", "[\\-a\\n]", "[ä-ü]", '"']),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{0,3}", "{1,2}?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(25, 150), deadline=None)
@given(st.data())
def test_no_text_that_a_pattern_matches_is_wider(data: st.DataObject) -> None:
    pattern = data.draw(PATTERNS)
    # \d and \w are of ASCII
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    assert len(text.encode("utf-8", "replace")) <= pattern_width(pattern, plain, searched=False)
    inside = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    assert len(inside) - 2 <= pattern_width(f"^{pattern}$", in_json, searched=True)


@pytest.mark.parametrize("pattern", [
    "a+", "a{2,}", "a*?", "(?i)a", "(?=a)", "a\\b", "(a", "a)", "[a", "[[a]]", "[a&&b]", "a{,3}", "a$b",
])  # fmt: skip
def test_what_is_not_understood_has_no_width(pattern: str) -> None:
    with pytest.raises(NoWidth):
        pattern_width(pattern, plain, searched=False)


@pytest.mark.parametrize("pattern", ["a", "^a", "a$", "^a|b$", "^a$|b"])
def test_a_pattern_that_is_searched_for_has_anchors(pattern: str) -> None:
    with pytest.raises(NoWidth, match="at its"):
        pattern_width(pattern, in_json, searched=True)
