"""`batchinfer init --from`: a schema becomes a valid job whose answers follow it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.job import load_job
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.verbs.schema_starter import MAX_TOKENS
from tests.batchinfer.wrong_jobs import CliOf, Command

ORDER = {
    "type": "object",
    "properties": {"customer": {"type": "string", "maxLength": 8,
        "description": "Who ordered,\nas {{ written }} for ${HOME}"}, "kind": {"$ref": "#/$defs/kind"},
        "due": {"type": "string", "format": "date"}, "count": {"type": ["integer", "null"]}},
    "required": ["customer", "kind", "due", "count"],
    "$defs": {"kind": {"enum": ["new", "old"]}},
}  # fmt: skip


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(ENGINE)


def schema_file(folder: Path, schema: Any, name: str = "order.schema.json") -> Path:
    path = folder / name
    path.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return path


def test_the_job_runs_and_its_answers_are_columns(tmp_path: Path, model: Path, run: Command) -> None:
    source = schema_file(tmp_path, ORDER)
    folder = tmp_path / "new"
    done = run("init", folder, "--model", model, "--from", source)
    assert done.code == 0, done.err
    assert f"wrote {folder / 'order.schema.json'}" in done.out
    assert (folder / "order.schema.json").read_bytes() == source.read_bytes()
    source.unlink()
    job = folder / "job.yaml"
    checked = run("validate", job)
    assert checked.code == 0, checked.err
    assert "due date32" in checked.out
    shown = json.loads(run("preview", job, "--json").out.splitlines()[0])
    for line in (
        "- customer: Who ordered, as {{ written }} for ${HOME}",
        '- kind: one of "new", "old"',
        "- due: date",
    ):
        assert line in shown["text"]
    assert shown["sampling"]["max_tokens"] < 200
    told = run("run", job, "--json", "--set", "engine.device=cpu", "--set", "sampling.temperature=1.2")
    assert told.code == 0, told.err
    assert json.loads(told.out)["rows_ok"] == 4
    (part,) = (folder / "results").glob("*.parquet")
    table = pq.read_table(part)
    assert table.schema.field("count").type == pa.int64()
    for text in table.column("generated_text").to_pylist():
        jsonschema.validate(json.loads(text), ORDER)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("schema", "column", "tokens"), [
    (ORDER, None, "fit"),
    ({"type": "object", "properties": {"n": {"type": "number"}}}, None, MAX_TOKENS),
    ({"type": "object", "properties": {"n": {"type": "string", "maxLength": 1000}}}, None, MAX_TOKENS),
    ({"type": "object", "properties": {"TEXT": {"type": "null"}}}, "answer", "fit"),
    ({"type": "object", "properties": {"status": {"type": "null"}}}, "answer", "fit"),
    ({"type": "array", "items": {"type": "boolean"}}, "answer", MAX_TOKENS),
    ({"enum": ["yes", "no"]}, "answer", "fit"),
    ({}, "answer", MAX_TOKENS),
])  # fmt: skip
def test_every_schema_gives_a_right_job(
    tmp_path: Path, model: Path, run: Command, schema: Any, column: str | None, tokens: Any
) -> None:
    folder = tmp_path / "new"
    assert (
        run("init", folder, "--model", model, "--from", schema_file(tmp_path, schema, "a$b {x}.json")).code
        == 0
    )
    job = load_job(folder / "job.yaml", env={})
    assert (job.output.column, job.sampling.max_tokens) == (column, tokens)
    assert json.loads(job.output.json_schema or "") == schema
    done = run("validate", folder / "job.yaml")
    assert done.code == 0, done.err


def test_a_schema_in_the_folder_is_used_in_place(tmp_path: Path, model: Path, run: Command) -> None:
    source = schema_file(tmp_path, ORDER)
    done = run("init", tmp_path, "--model", model, "--from", source)
    assert (done.code, "order.schema.json" in done.out) == (0, False)
    assert load_job(tmp_path / "job.yaml").output.schema_file == source


@pytest.mark.parametrize(("schema", "code", "words"), [
    (None, 66, "No such file"),
    ("{x", 65, "the schema is not JSON"),
    ("[]", 65, "a JSON Schema is an object"),
    ({"uniqueItems": True, "type": "array"}, 65, "uniqueItems"),
    (" " * (1 << 20) + "{}", 65, "over the limit"),
])  # fmt: skip
def test_what_answers_cannot_follow_is_refused(
    tmp_path: Path, model: Path, run: Command, schema: Any, code: int, words: str
) -> None:
    source = tmp_path / "a.json" if schema is None else schema_file(tmp_path, schema, "a.json")
    done = run("init", tmp_path / "new", "--model", model, "--from", source)
    assert (done.code, words in done.err) == (code, True), done.err
    assert str(source) in done.err
    assert not (tmp_path / "new").exists()


def test_a_schema_has_no_name_of_another_file(tmp_path: Path, model: Path, run: Command) -> None:
    done = run(
        "init", tmp_path / "new", "--model", model, "--from", schema_file(tmp_path, ORDER, "prompts.jsonl")
    )
    assert (done.code, "prompts.jsonl" in done.err) == (2, True)


def test_without_a_model_the_quickstart_s_stands_in_and_that_is_said(tmp_path: Path, run: Command) -> None:
    done = run("init", tmp_path / "new", "--from", schema_file(tmp_path, ORDER))
    assert done.code == 0, done.err
    assert (
        "mean nothing; for useful answers name a model of your own in job.yaml, or with --model" in done.out
    )
    assert (tmp_path / "new" / "model" / "config.json").is_file()
    assert run("validate", tmp_path / "new" / "job.yaml").code == 0
    plain = run("init", tmp_path / "plain")
    assert "mean nothing" not in plain.out
