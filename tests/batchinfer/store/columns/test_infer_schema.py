"""`batchinfer schema infer`: from files to a schema, and messages about files without one."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar import check_grammar
from batchinfer.store.columns.schema_columns import schema_columns
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Command

ANSWERS = [{"kind": "a", "n": 1, "tags": ["x"]}, {"kind": "b", "n": None, "tags": []}]
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"kind": {"type": "string"}, "n": {"type": ["integer", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["kind", "n", "tags"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(NO_ENGINE)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def write(folder: Path, form: str) -> Path:
    """Write the examples in a format, plus a last row without an example."""
    path, texts = folder / form, [json.dumps(one) for one in ANSWERS]
    if form == "objects.jsonl":
        return lines(path, *({"x": 1, "a": one} for one in ANSWERS), {"a": None})
    if form == "texts.jsonl":
        return lines(path, *({"a": one} for one in texts), {"x": 1})
    if form == "texts.csv":
        quoted = ['"' + one.replace('"', '""') + '"' for one in texts]
        path.write_text("\n".join(["x,a", *(f"1,{one}" for one in quoted), "2,"]) + "\n")
    else:
        pq.write_table(pa.table({"a": pa.array([*(texts if "texts" in form else ANSWERS), None])}), path)
    return path


FORMS = ["objects.jsonl", "texts.jsonl", "texts.csv", "structs.parquet", "texts.parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_a_column_of_any_format(tmp_path: Path, run: Command, form: str) -> None:
    done = run("schema", "infer", write(tmp_path, form), "--column", "a")
    assert done.code == 0, done.err
    assert json.loads(done.out) == SCHEMA
    assert "looked at all 3 rows; 2 of them have an example" in done.err


def test_rows_are_examples_without_a_column_and_only_the_first_are_read(tmp_path: Path, run: Command) -> None:
    path = lines(tmp_path / "a.jsonl", *ANSWERS, "no JSON at all")
    done = run("schema", "infer", path, "--rows", 2)
    assert json.loads(done.out) == SCHEMA
    assert "looked at the first 2 rows" in done.err


def test_unreadable_rows_are_skipped_up_to_one_percent(tmp_path: Path, run: Command) -> None:
    rows: list[Any] = [{"a": one} for one in ANSWERS] * 100
    rows[7], rows[90] = '{"a": 1, "a": 2}', {"a": "{no JSON"}
    done = run("schema", "infer", lines(tmp_path / "a.jsonl", *rows), "--column", "a")
    assert done.code == 0, done.err
    assert json.loads(done.out)["required"] == ["kind", "n", "tags"]
    assert "all 200 rows; 198 of them have an example" in done.err
    assert "skipped 2 rows without a valid example; the first:" in done.err
    assert "row 7: " in done.err
    assert "occurs twice" in done.err
    rows[91] = "{"
    done = run("schema", "infer", lines(tmp_path / "a.jsonl", *rows), "--column", "a")
    assert (done.code, done.out) == (65, "")
    assert "row 7: " in done.err
    assert "3 of 200 rows have no valid example, and at most 1% may lack one" in done.err


@pytest.mark.parametrize(("values", "schema", "kind", "why"), [
    ([1, 2**63 - 1], {"type": "integer"}, pa.int64(), None),
    ([1, 2**63], {"type": "number"}, pa.float64(), "n: There are integers beyond 64 bits"),
    ([10**22, None], {"type": ["number", "null"]}, pa.float64(), "beyond 64 bits"),
    ([10**22 + 1], {"anyOf": [{"type": "integer"}, {"type": "number"}]}, pa.string(), "JSON text"),
    ([0.5, 2**53 + 1], {"anyOf": [{"type": "integer"}, {"type": "number"}]}, pa.string(), "JSON text"),
    ([-(10**400)], {"anyOf": [{"type": "integer"}, {"type": "number"}]}, pa.string(), "JSON text"),
    ([2**70, 0.5], {"type": "number"}, pa.float64(), "beyond 64 bits"),
    ([2**53, 0.5], {"type": "number"}, pa.float64(), None),
    ([2**70, "x"], {"type": ["integer", "string"]}, pa.string(), None),
])  # fmt: skip
def test_the_column_holds_every_integer(
    tmp_path: Path,
    run: Command,
    values: list[Any],
    schema: dict[str, Any],
    kind: pa.DataType,
    why: str | None,
) -> None:
    done = run("schema", "infer", lines(tmp_path / "a.jsonl", *({"n": one} for one in values)))
    found = json.loads(done.out)
    inferred = {name: said for name, said in found["properties"]["n"].items() if name != "$comment"}
    assert inferred == schema
    columns = schema_columns(found)
    assert columns.schema.field("n").type == kind
    for one in values:
        jsonschema.validate({"n": one}, found)
        columns.check({"n": one})
    check_grammar(SamplingParams(json_schema=done.out))
    assert (why or "looked at") in done.err


def test_types_of_parquet(tmp_path: Path, run: Command) -> None:
    values = {
        "day": [date(2026, 1, 2)],
        "at": [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)],
        "local": [datetime(2026, 1, 2, 3, 4, 5)],
        "price": [Decimal("1.25")],
        "inner": [{"w": 1}],
    }
    pq.write_table(pa.table(values), tmp_path / "a.parquet")
    found = json.loads(run("schema", "infer", tmp_path / "a.parquet").out)["properties"]
    assert [one.get("format", one["type"]) for one in found.values()] == [
        "date", "date-time", "date-time", "number", "object",
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "arguments", "code", "words"), [
    ([{"b": 1, "c": 2}], ["--column", "a"], 2, "no row has a column 'a'; there are b, c"),
    ([{"a": None}, {"a": None}], ["--column", "a"], 65, "nothing but nulls in the first 2 rows"),
    ([{"a": "1"}, {"a": "{x"}], ["--column", "a"], 65, "a.jsonl: row 1, column 'a': is not JSON"),
    ([{"a": "NaN"}], ["--column", "a"], 65, "row 0, column 'a': NaN is not a JSON number"),
    ([{"a": 1}, "{x"], [], 65, "a.jsonl: row 1: "),
    ([], [], 65, "a.jsonl: there are no rows"),
    ([{"a": 1}], ["--rows", "0"], 2, "--rows"),
])  # fmt: skip
def test_errors_name_their_place(
    tmp_path: Path, run: Command, rows: list[Any], arguments: list[str], code: int, words: str
) -> None:
    done = run("schema", "infer", lines(tmp_path / "a.jsonl", *rows), *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_a_column_that_parquet_does_not_declare(tmp_path: Path, run: Command) -> None:
    done = run("schema", "infer", write(tmp_path, "texts.parquet"), "--column", "b")
    assert (done.code, "no row has a column 'b'; there are a" in done.err) == (2, True)
    assert run("schema", "infer", tmp_path / "none.jsonl").code == 66
