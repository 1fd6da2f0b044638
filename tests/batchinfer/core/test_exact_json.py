"""Numbers of a schema keep every digit in every spelling of the schema."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.errors import JobFileError
from batchinfer.core.exact_json import read_float, write_exactly
from batchinfer.input.json_text import parse_row
from batchinfer.input.prompts.sampling_fields import CHECKS
from batchinfer.job import load_job
from tests.batchinfer.wrong_jobs import Place

SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"number","minimum":9007199254740993.5,'
    '"maximum":18446744073709551617.5},"b":{"type":"integer","maximum":9007199254740993}},"required":["a","b"]}'
)
NUMBERS = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})\.[0-9]{1,25}([eE][-+]?[0-9]{1,3})?", fullmatch=True),
).filter(lambda text: "." in text or "e" in text)


@given(NUMBERS)
def test_a_number_is_written_as_it_was_read(text: str) -> None:
    for value in (read_float(text), pickle.loads(pickle.dumps(read_float(text)))):
        assert value == float(text)
        assert Decimal(write_exactly([value])[1:-1]) == Decimal(text)


def test_deep_nesting_is_written_unchanged() -> None:
    deep = "[" * 500 + "0.5" + "]" * 500
    assert write_exactly(json.loads(deep)) == deep


def output_of(kind: str, schema: str, place: Place) -> str:
    (place.folder / "schema.json").write_text(schema)
    given = {
        "mapping": f"schema: {schema}",
        "text": f"schema: '{schema}'",
        "file": "schema_file: schema.json",
    }
    return f"output: {{path: out/res, {given[kind]}}}"


@pytest.mark.parametrize("kind", ["mapping", "text", "file"])
def test_a_schema_keeps_its_digits(place: Place, kind: str) -> None:
    job = load_job(place.job(output=output_of(kind, SCHEMA, place)), [], None)
    assert job.params().json_schema == SCHEMA


def test_a_schema_of_a_row_keeps_its_digits() -> None:
    row = parse_row(f'{{"json_schema": {SCHEMA}}}'.encode())
    assert CHECKS["json_schema"]("json_schema", row["json_schema"]) == SCHEMA


@pytest.mark.parametrize("kind", ["text", "file"])
def test_a_duplicate_name_is_refused(place: Place, kind: str) -> None:
    twice = SCHEMA.replace('"required"', '"properties":{},"required"')
    path = place.job(output=output_of(kind, twice, place))
    with pytest.raises(JobFileError, match="has the name 'properties' twice in one object"):
        load_job(path, [], None)
