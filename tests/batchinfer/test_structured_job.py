"""Runs jobs with constraints, from the job file to typed columns, with a tiny model of random weights."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

import duckdb
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.batchinfer.wrong_jobs import CliOf, Command, Place

REAL = "batchinfer.engine.load.build:load_weights"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["order", "question", "complaint"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999}, "due": {"type": "string", "format": "date"},
        "urgent": {"type": "boolean"}, "tags": {"type": "array", "items": {"type": "string",
        "pattern": "^[a-z]{1,4}$"}, "maxItems": 2}, "note": {"type": ["string", "null"], "maxLength": 5},
        "size": {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]}},
    "required": ["kind", "count", "due", "urgent", "tags"],
}  # fmt: skip
COLUMNS = {
    "kind": pa.dictionary(pa.int32(), pa.string()),
    "count": pa.int64(),
    "due": pa.date32(),
    "urgent": pa.bool_(),
    "tags": pa.list_(pa.string()),
    "note": pa.string(),
    "size": pa.struct([("w", pa.int64())]),
}


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(REAL)


def output(**more: Any) -> str:
    return f"output: {json.dumps({'path': 'out/res', 'schema': SCHEMA, **more})}"


def many(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "text": f"row {n} " + "x" * (n % 5)} for n in range(count)]


def test_every_whole_answer_is_valid_and_in_columns(place: Place, run: Command) -> None:
    """Random texts at a high temperature; a third of the answers is truncated by max_tokens."""
    place.rows(*({**row, "max_tokens": 9 if n % 3 == 0 else 200} for n, row in enumerate(many(30))))
    sampling = (
        "{temperature: 1.4, seed: 3, stop: ['zzzz'], frequency_penalty: 0.1, from_columns: [max_tokens]}"
    )
    place.job(
        "on_error: {max_error_rate: 0.5}",
        "engine: {max_num_seqs: 16}",
        sampling=f"sampling: {sampling}",
        output=output(),
    )
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    (shape,) = [line for line in done.out.splitlines() if line.startswith("  guided")]
    assert re.search(
        r"30 answers under a constraint, which forbade the most likely token in [1-9]\d*; \S+ tokens forced",
        shape,
    ), shape
    (file,) = place.results.glob("*.parquet")
    table = pq.read_table(file)
    assert {name: table.schema.field(name).type for name in COLUMNS} == COLUMNS
    rows = table.to_pylist()
    whole = [row for row in rows if row["status"] == "ok"]
    assert len(whole) >= 17
    for row in whole:
        answer = json.loads(row["generated_text"])
        jsonschema.validate(answer, SCHEMA, format_checker=jsonschema.FormatChecker())
        assert row["finish_reason"] == "stop"
        assert row["due"] == date.fromisoformat(answer.pop("due"))
        assert all(row[name] == answer.get(name) for name in COLUMNS if name != "due")
        written = re.sub(r"-0\b(?!\.)", "0", row["generated_text"])  # Python has no integer of -0
        assert written == json.dumps(json.loads(written), ensure_ascii=False) or "\\" in written
    truncated = [row for row in rows if row["status"] == "error"]
    assert {row["error_code"] for row in truncated} <= {"incomplete_output", "unfit_output"}
    assert sum(row["error_code"] == "incomplete_output" for row in truncated) >= 7
    assert all(row["generated_text"] and row["kind"] is None and row["size"] is None for row in truncated)
    assert all(not row["retryable"] for row in truncated)
    found = duckdb.sql(
        f"select kind, sum(count) total from '{file}' where status = 'ok' group by all"
    ).fetchall()
    assert sum(total for _, total in found) == sum(row["count"] for row in whole)


def test_rows_set_constraints_of_their_own(place: Place, run: Command) -> None:
    """A bad constraint costs its row; rows without one are free."""
    rows = [
        {"id": "regex", "regex": r"[0-9]{3}-[a-c]+x"},
        {"id": "choice", "choice": ["yes", "no", "perhaps"]},
        {"id": "lark", "grammar": 'start: "a" ("," "b")~2'},
        {"id": "gbnf", "grammar": 'root ::= "x" [0-9] "y"'},
        {"id": "schema", "json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        {"id": "object", "json_object": True},
        {"id": "free"},
        {"id": "parentheses", "regex": "(" * 30_000},
        {"id": "unclosed", "regex": "(a"},
        {"id": "unknown keyword", "json_schema": {"uniqueItems": True, "type": "array"}},
        {"id": "no schema", "json_schema": "[1]"},
        {"id": "no grammar", "grammar": "start: nothing"},
        {"id": "two", "regex": "a", "choice": ["a"]},
        {"id": "long", "json_schema": json.dumps({"type": "string", "description": "x" * (1 << 20)})},
        {"id": "slow", "regex": "(a{5,1000}){1,1000}b", "max_tokens": 4},
    ]
    place.rows(*({"text": "t", **row} for row in rows))
    names = "regex, choice, grammar, json_schema, json_object, max_tokens"
    place.job(
        "on_error: {max_error_rate: 1.0}",
        sampling=f"sampling: {{max_tokens: 60, temperature: 1, from_columns: [{names}]}}",
    )
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    found = {row["custom_id"]: row for row in place.table()}
    texts = {name: row["generated_text"] for name, row in found.items() if row["status"] == "ok"}
    assert re.fullmatch(r"[0-9]{3}-[a-c]+x", texts["regex"])
    assert texts["choice"] in ("yes", "no", "perhaps")
    assert texts["lark"] == "a,b,b"
    assert re.fullmatch("x[0-9]y", texts["gbnf"])
    assert all(isinstance(one, bool) for one in json.loads(texts["schema"]))
    assert "free" in texts
    codes = {name: row["error_code"] for name, row in found.items() if row["status"] == "error"}
    bad = {"parentheses", "unclosed", "unknown keyword", "no grammar"}
    assert {name for name, code in codes.items() if code == "bad_constraint"} == bad
    assert {name for name, code in codes.items() if code == "bad_parameter"} == {"no schema", "two", "long"}
    assert codes["slow"] == "incomplete_output"
    assert codes.get("object") == "incomplete_output" or isinstance(json.loads(texts["object"]), dict)
    assert "uniqueItems" in found["unknown keyword"]["error_message"]
    assert "more than 200" in found["parentheses"]["error_message"]


def test_validate_names_columns_that_stay_text(place: Place, run: Command) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "string"]}},
    }
    (place.folder / "shape.json").write_text(json.dumps(schema))
    place.job(output="output: {path: out/res, schema_file: shape.json}")
    done = run("validate", place.folder / "job.yaml")
    assert done.code == 0, done.err
    assert "b: JSON text, because it has several types" in done.out + done.err
    assert "a int64" in done.out + done.err


@pytest.mark.slow
def test_no_answer_is_truncated_if_max_tokens_fits(place: Place, run: Command) -> None:
    """Random texts, but complete answers. Rows set their own constraint or limit."""
    shape = {**SCHEMA["properties"], "at": {"type": ["string", "null"], "format": "date-time"}}
    own = {"type": "object", "properties": shape, "required": list(shape)}
    endless = {"type": "array", "items": {"type": "boolean"}}
    place.rows(
        *({**row, "json_schema": own} for row in many(20)),
        {"id": "choice", "text": "t", "choice": ["yes", "perhaps"]},
        {"id": "endless", "text": "t", "json_schema": endless},
        {"id": "cut", "text": "t", "json_schema": endless, "max_tokens": 1},
        {"id": "free", "text": "t"},
    )
    place.job(
        "on_error: {max_error_rate: 1.0}",
        sampling="sampling: {max_tokens: fit, min_tokens: 3, temperature: 1.4, seed: 5, "
        "from_columns: [json_schema, choice, max_tokens]}",
    )
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    found = {row["custom_id"]: row for row in place.table()}
    codes = {name: row["error_code"] for name, row in found.items() if row["status"] == "error"}
    assert codes == {"endless": "bad_parameter", "free": "bad_parameter", "cut": "bad_parameter"}
    assert found["endless"]["error_message"] == "max_tokens is fit: the answer: give maxItems"
    assert "min_tokens" in found["cut"]["error_message"]
    for n in range(20):
        jsonschema.validate(json.loads(found[f"r{n}"]["generated_text"]), own)
    shown = run("preview", place.folder / "job.yaml", "--rows", 21, "--json")
    limits = [json.loads(line)["sampling"]["max_tokens"] for line in shown.out.splitlines()]
    assert limits[20] == len("perhaps") + 1
    assert 150 < limits[0] < 300


def test_validate_prints_the_bound_of_answers(place: Place, run: Command) -> None:
    place.job(sampling="sampling: {max_tokens: fit, choice: [yes, perhaps]}")
    done = run("validate", place.folder / "job.yaml")
    assert done.code == 0, done.err
    assert "an answer has at most 8 tokens (max_tokens: fit)" in done.out


def test_openai_requests_fit_their_format(place: Place, run: Command) -> None:
    formats = [{"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}, {"type": "text"}]
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    messages = [{"role": "user", "content": "hi"}]
    bodies = [
        {"messages": messages, "response_format": formats[0]},
        {"messages": messages, "response_format": formats[1]},
        {"messages": messages, "max_completion_tokens": 3},
    ]
    place.rows(*({"custom_id": f"c{n}", **chat, "body": one} for n, one in enumerate(bodies)))
    place.job(
        input="input: {path: rows.jsonl, format: openai}",
        prompt="",
        sampling="sampling: {max_tokens: fit}",
        output="output: {path: out/res}",
    )
    done = run("preview", place.folder / "job.yaml", "--json")
    assert done.code == 0, done.err
    boolean, text, own = map(json.loads, done.out.splitlines())
    assert boolean["sampling"]["max_tokens"] == len("false") + 1
    assert text["error"]["code"] == "bad_parameter"
    assert own["sampling"]["max_tokens"] == 3
