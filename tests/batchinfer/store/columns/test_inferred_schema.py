"""Inferred schemas: every example is valid, and columns are typed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.constraints.grammar import check_grammar
from batchinfer.store.columns.inferred_schema import MAX_PARTS, MAX_PROPERTIES, InferredSchema, NoJson
from batchinfer.store.columns.schema_columns import schema_columns
from tests.examples import examples

FORMATS = jsonschema.FormatChecker(["date", "uuid"])  # other formats depend on installed packages


def inferred(*examples: Any) -> dict[str, Any]:
    found = InferredSchema()
    for example in examples:
        found.add(example)
    schema = found.schema
    assert schema.pop("$schema").endswith("2020-12/schema")
    return schema


def check(schema: Any, examples: list[Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    for example in examples:
        validator.validate(example)
    assert parsed_schema(json.dumps(schema)) == schema
    check_grammar(SamplingParams(json_schema=json.dumps(schema)))  # answers can follow it


TEXTS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["red", "green"]),
    st.dates().map(str),
    st.datetimes().map(lambda t: f"{t.isoformat()}Z"),
    st.times().map(lambda t: f"{t.isoformat()}+01:00"),
    st.uuids().map(str),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=6), st.sampled_from([1, 20]))
def test_every_example_is_valid(examples: list[Any], times: int) -> None:
    check(inferred(*examples * times), examples)


KINDS = st.recursive(
    st.sampled_from(
        [
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False, allow_infinity=False),
            st.dates().map(str),
            st.uuids().map(str),
            st.text(max_size=3),
            st.sampled_from(["a", "b"]),
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda kind: st.lists(kind, max_size=3)),
        inner.map(lambda kind: st.none() | kind),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: st.fixed_dictionaries(
                {"x": kinds[0]}, optional=dict(zip("yz", kinds[1:], strict=False))
            )
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.data())
def test_examples_of_one_kind_have_typed_columns(data: st.DataObject) -> None:
    kind = data.draw(st.fixed_dictionaries({"a": KINDS, "b": KINDS}))
    examples = data.draw(st.lists(st.fixed_dictionaries(kind), min_size=1, max_size=8)) * data.draw(
        st.sampled_from([1, 20])
    )
    schema = inferred(*examples)
    check(schema, examples)
    columns = schema_columns(schema)
    assert columns.notes == ()
    assert set(columns.schema.names) == {"a", "b"}
    for example in examples:
        columns.check(example)
    assert {len(array) for array in columns.arrays(examples)} == {len(examples)}


def test_what_is_found() -> None:
    rows = [
        {
            "kind": "order" if n % 3 else "question",
            "name": f"name {n}",
            "due": "2026-01-02",
            "at": "2026-01-02T03:04:05.5Z",
            "when": "10:20:30+02:00",
            "id": "123e4567-e89b-12d3-a456-42661417400A",
            "count": n,
            "price": n if n % 2 else 0.5,
            "seen": None if n % 2 else True,
            "tags": [] if n % 4 else ["a", "b"],
            "empty": [],
            "inner": {"w": 1} if n % 2 else {"w": 2, "h": None},
            "mixed": "x" if n % 2 else 1,
        }
        for n in range(40)
    ]
    assert inferred(*rows, {**rows[0], "late": 1}) == {
        "type": "object",
        "properties": {"kind": {"enum": ["order", "question"]}, "name": {"type": "string"},
            "due": {"type": "string", "format": "date"}, "at": {"type": "string", "format": "date-time"},
            "when": {"type": "string", "format": "time"}, "id": {"type": "string", "format": "uuid"},
            "count": {"type": "integer"}, "price": {"type": "number"}, "seen": {"type": ["boolean", "null"]},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}}, "empty": {"type": "array",
            "items": {"type": "null"}, "maxItems": 0}, "inner": {"type": "object",
            "properties": {"w": {"type": "integer"}, "h": {"type": "null"}}, "required": ["w"],
            "additionalProperties": False}, "mixed": {"type": ["integer", "string"]}, "late": {"type": "integer"}},
        "required": list(rows[0]),
        "additionalProperties": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "schema"),
    [
        (["yes", "no"] * 10, {"enum": ["no", "yes"]}),
        (["yes", "no", None] * 10, {"enum": ["no", "yes", None]}),
        (["yes", "no"] * 9, {"type": "string"}),
        ([str(n % 25) for n in range(500)], {"type": "string"}),
        (["x" * 101] * 50, {"type": "string"}),
        (["yes", 1] * 20, {"type": ["string", "integer"]}),
        (["2026-02-30"], {"type": "string"}),
        (["2026-02-28", "soon"], {"type": "string"}),
        (["10:20:30"], {"type": "string"}),  # JSON Schema's times have an offset
        (["2026-01-01T00:00:00.1234567Z"], {"type": "string"}),  # more than a column keeps
    ],
)
def test_texts(texts: list[Any], schema: Any) -> None:
    assert inferred(*texts) == schema


def test_size_is_bounded() -> None:
    """Many names, deep nesting and many parts give an open schema that is valid and that a job accepts."""
    keys = [{f"k{n}": n} for n in range(MAX_PROPERTIES + 1)]
    assert inferred({"data": {}}, *({"data": one} for one in keys))["properties"]["data"] == {
        "type": "object"
    }
    deep: Any = 1
    for _ in range(60):
        deep = {"a": [deep]}
    check(inferred(deep), [deep])
    wide = [{f"a{n}": {f"b{m}": n + m for m in range(400)}} for n in range(100)]
    schema = inferred(*wide)
    check(schema, wide)
    assert len(json.dumps(schema)) < 60 * MAX_PARTS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {"a": [object()]}])
def test_what_json_does_not_have(value: Any) -> None:
    with pytest.raises(NoJson):
        inferred(value)
