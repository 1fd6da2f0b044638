"""Columns of a JSON Schema, and their values."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.exact_json import write_exactly
from batchinfer.store.columns.column_kinds import Unfit
from batchinfer.store.columns.schema_columns import MAX_COLUMNS, NoColumns, schema_columns
from tests.examples import examples

ENUM = pa.dictionary(pa.int32(), pa.string())
TYPES = [
    ({"type": "string"}, pa.string()),
    ({"type": "string", "format": "email"}, pa.string()),
    ({"type": "string", "format": "date"}, pa.date32()),
    ({"type": "string", "format": "time"}, pa.time64("us")),
    ({"type": "string", "format": "date-time"}, pa.timestamp("us", "UTC")),
    ({"type": "string", "format": "uuid"}, pa.uuid()),
    ({"type": "integer", "minimum": 0}, pa.int64()),
    ({"type": "number"}, pa.float64()),
    ({"type": ["integer", "number"]}, pa.float64()),
    ({"type": "boolean"}, pa.bool_()),
    ({"type": "null"}, pa.null()),
    ({"enum": ["a", "b"]}, ENUM),
    ({"enum": ["a", None]}, ENUM),
    ({"type": "string", "enum": ["a"]}, ENUM),
    ({"const": "a"}, ENUM),
    ({"enum": [1, 2, None]}, pa.int64()),
    ({"enum": [1, 2.5]}, pa.float64()),
    ({"enum": [True, False]}, pa.bool_()),
    ({"const": None}, pa.null()),
    ({"type": ["string", "null"]}, pa.string()),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, pa.int64()),
    ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/day"}], "description": "when"}, pa.date32()),
    ({"$ref": "#/$defs/day"}, pa.date32()),
    ({"allOf": [{"$ref": "#/$defs/day"}], "title": "as pydantic writes it"}, pa.date32()),
    ({"type": "array", "items": {"type": "number"}}, pa.list_(pa.float64())),
    ({"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a"]}}},
        pa.struct([("x", pa.int64()), ("y", ENUM)])),
    ({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "array", "items": {"const": 1}}}}},
        pa.list_(pa.struct([("x", pa.list_(pa.int64()))]))),
]  # fmt: skip
# What stays JSON text, with words of the reason
TEXTS = [
    ({}, "which type"),
    (True, "which type"),
    ({"type": ["string", "integer"]}, "several types"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "2 alternatives"),
    ({"anyOf": [{"type": "string"}], "type": "string", "maxLength": 3}, "next to its anyOf"),
    ({"allOf": [{"type": "string"}, {"minLength": 3}]}, "allOf"),
    ({"not": {"type": "string"}}, "not"),
    ({"enum": ["a", 1]}, "several types"),
    ({"type": "object"}, "not named"),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "additionalProperties"),
    ({"type": "object", "properties": {"a": {}, "A": {}}}, "case only"),
    ({"type": "object", "properties": {"": {}}}, "empty name"),
    ({"type": "array"}, "items"),
    ({"type": "array", "prefixItems": [{"type": "string"}]}, "first items"),
    ({"$ref": "#/$defs/nothing"}, "names nothing"),
    ({"$ref": "https://example.org/schema"}, "another document"),
    ({"$ref": "#/$defs/day", "minLength": 1}, "next to its $ref"),
    ({"$ref": "#/$defs/loop"}, "without end"),
]
DEFS = {
    "$defs": {"day": {"type": "string", "format": "date"}, "loop": {"$ref": "#/$defs/loop"},
        "tree": {"type": "object", "properties": {"name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
}  # fmt: skip


def whole(one: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": one}, **DEFS}


@pytest.mark.parametrize(("schema", "kind"), TYPES, ids=[json.dumps(one)[:60] for one, _ in TYPES])
def test_types(schema, kind):
    columns = schema_columns(whole(schema))
    assert columns.schema == pa.schema([("v", kind)])
    assert columns.notes == ()
    assert columns.arrays([None, {}])[0].null_count == 2


@pytest.mark.parametrize(("schema", "why"), TEXTS, ids=[json.dumps(one)[:60] for one, _ in TEXTS])
def test_columns_that_stay_text_have_a_reason(schema, why):
    columns = schema_columns(whole(schema))
    assert columns.schema == pa.schema([("v", pa.string())])
    (note,) = columns.notes
    assert note.place == "v"
    assert why in note.why


def test_recursive_parts_are_text():
    columns = schema_columns(whole({"$ref": "#/$defs/tree"}))
    inner = pa.list_(pa.string())
    assert columns.schema.field("v").type == pa.struct([("name", pa.string()), ("children", inner)])
    assert [(note.place, note.why) for note in columns.notes] == [("v.children[]", "it contains itself")]
    value = {"v": {"name": "a", "children": [{"name": "b", "children": []}]}}
    columns.check(value)
    assert columns.arrays([value])[0].to_pylist() == [
        {"name": "a", "children": ['{"name":"b","children":[]}']}
    ]


def test_references_that_multiply_are_bounded():
    defs = {
        f"d{n}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}}
        for n in range(40)
    }
    columns = schema_columns({"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"type": "string"}}})
    assert len(columns.notes) <= 2 * MAX_COLUMNS


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "array", "items": {"type": "string"}}, "names no properties"),
    ({"type": "object"}, "names no properties"),
    ({"type": ["object", "null"], "properties": {"a": {}}}, "names no properties"),
    (True, "names no properties"),
    ({"properties": {"a": {}, "A": {}}}, "case only"),
    ({"$ref": "#/nowhere"}, "names nothing"),
])  # fmt: skip
def test_no_columns(schema, words):
    with pytest.raises(NoColumns, match=words):
        schema_columns(schema)


def test_one_column():
    schema = {"type": "array", "items": {"type": "integer"}}
    columns = schema_columns(schema, "answer")
    assert columns.schema == pa.schema([("answer", pa.list_(pa.int64()))])
    assert columns.arrays([[1, 2], None])[0].to_pylist() == [[1, 2], None]
    assert schema_columns(whole({"type": "integer"}), "answer").schema.field("answer").type == pa.struct(
        [("v", pa.int64())]
    )


def test_what_else_an_object_may_have_is_noted():
    columns = schema_columns({"properties": {"a": {"type": "integer"}}, "additionalProperties": True})
    assert columns.schema == pa.schema([("a", pa.int64())])
    assert "only in generated_text" in str(columns.notes[0])


UNFIT = [
    ({"type": "integer"}, 2**63, "64 bits"),
    ({"type": "integer"}, -(2**63) - 1, "64 bits"),
    ({"type": "integer"}, Decimal("1e30"), "64 bits"),
    ({"type": "integer"}, Decimal("1.5"), "not a whole number"),
    ({"type": "integer"}, True, "not a whole number"),
    ({"type": "number"}, Decimal("1e400"), "beyond the range"),
    ({"type": "number"}, Decimal("1e-400"), "closer to zero"),
    ({"type": "number"}, 2**53 + 1, "more digits"),
    ({"type": "number"}, "1", "not a number"),
    ({"type": "string", "format": "date"}, "2023-02-29", "no day 29 in month 02 of the year 2023"),
    ({"type": "string", "format": "date"}, "0000-01-01", "no day 01 in month 01 of the year 0000"),
    ({"type": "string", "format": "time"}, "12:00:60Z", "a time of day"),
    ({"type": "string", "format": "date-time"}, "2024-01-01T00:00:00.1234567Z", "six decimals"),
    ({"type": "string", "format": "date-time"}, "0001-01-01T00:00:00+05:00", "outside the years"),
    ({"type": "string", "format": "uuid"}, "123", "a UUID"),
    ({"enum": ["a"]}, "b", "not one of the 1 values"),
    ({"type": "boolean"}, 1, "not true or false"),
    ({"type": "array", "items": {"type": "integer"}}, [1, 2**64], r"v\[1\]: .*64 bits"),
    ({"type": "array", "items": {"type": "integer"}}, {}, "not a list"),
    ({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": "x"}, "v.n: "),
]


@pytest.mark.parametrize(("schema", "value", "words"), UNFIT)
def test_values_that_do_not_fit_are_refused_with_their_place(schema, value, words):
    with pytest.raises(Unfit, match=words) as refused:
        schema_columns(whole(schema)).check({"v": value})
    assert str(refused.value).startswith("v")
    assert str(value) not in str(refused.value)


FIT = [
    ({"type": "integer"}, 2**63 - 1, 2**63 - 1),
    ({"type": "integer"}, Decimal("12.0"), 12),
    ({"type": "number"}, 2**60, float(2**60)),
    ({"type": "number"}, Decimal("0.1"), 0.1),
    ({"type": "number"}, Decimal("0e5"), 0.0),
    ({"type": "string", "format": "date"}, "2024-02-29", date(2024, 2, 29)),
    ({"type": "string", "format": "time"}, "12:30:00.5Z", time(12, 30, 0, 500_000)),
    ({"type": "string", "format": "time"}, "01:30:00+02:00", time(23, 30)),
    ({"type": "string", "format": "date-time"}, "2024-01-01T01:00:00+01:00", datetime(2024, 1, 1, tzinfo=UTC)),
    ({"type": "string", "format": "date-time"}, "2024-01-01t00:00:00.1000000z",
        datetime(2024, 1, 1, 0, 0, 0, 100_000, UTC)),
    ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000",
        UUID("123e4567-e89b-12d3-a456-426614174000")),
    ({}, [1, Decimal("1.50"), {"é": None}], '[1,1.50,{"é":null}]'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value", "wanted"), FIT)
def test_what_fits(schema, value, wanted):
    columns = schema_columns(whole(schema))
    columns.check({"v": value})
    (array,) = columns.arrays([{"v": value}, None, {}])
    assert array.to_pylist() == [wanted, None, None]


LEAVES = st.sampled_from(
    [
        ({"type": "string"}, st.text(max_size=5)),
        ({"type": "integer"}, st.integers(-(2**63), 2**63 - 1)),
        ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
        ({"type": "boolean"}, st.booleans()),
        ({"enum": ["a", "b", "ü"]}, st.sampled_from(["a", "b", "ü"])),
        ({"type": ["string", "null"]}, st.none() | st.text(max_size=3)),
    ]
)


def listed(inner):
    schema, values = inner
    return {"type": "array", "items": schema}, st.lists(values, max_size=3)


def named(inners):
    names = [f"p{n}" for n in range(len(inners))]
    schema = {
        "type": "object",
        "properties": dict(zip(names, (s for s, _ in inners), strict=True)),
        "required": names,
    }
    return schema, st.fixed_dictionaries(dict(zip(names, (v for _, v in inners), strict=True)))


SCHEMAS = st.recursive(
    LEAVES, lambda inner: inner.map(listed) | st.lists(inner, min_size=1, max_size=3).map(named), max_leaves=8
)


@given(data=st.data(), pair=SCHEMAS)
@settings(max_examples=examples(20, 60), deadline=None)
def test_values_survive_parquet_and_duckdb(tmp_path_factory, data, pair):
    """For any schema of these types and any values. A missing answer is null."""
    schema, values = pair
    answers = data.draw(st.lists(st.none() | values, min_size=1, max_size=5))
    columns = schema_columns(schema, "answer")
    for answer in answers:
        columns.check(answer)
    halves = [columns.arrays(answers[:2]), columns.arrays(answers[2:])]
    table = pa.concat_tables([pa.table(half, schema=columns.schema) for half in halves]).combine_chunks()
    path = tmp_path_factory.mktemp("columns") / "t.parquet"
    pq.write_table(table, path)
    assert pq.read_table(path).column("answer").to_pylist() == answers
    found = duckdb.sql(f"select answer from '{path}'").fetchall()
    assert [one for (one,) in found] == answers


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.decimals(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=10,
    )
)
@settings(max_examples=examples(20, 60), deadline=None)
def test_written_json_equals_the_parsed_value(value):
    assert json.loads(write_exactly(value), parse_float=Decimal) == value
