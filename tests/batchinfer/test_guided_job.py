"""Runs jobs with constraints that are killed, resumed, read early, and run again with other constraints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.batchinfer.input.tokenizer.made_tokenizers import words
from tests.batchinfer.test_deterministic_job import last
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Place

REAL = "batchinfer.engine.load.build:load_weights"
DYING = "tests.batchinfer.dying_engine:build"


def schema(count: Mapping[str, Any]) -> dict[str, Any]:
    properties = {
        "count": count,
        "state": {"enum": ["open", "paid"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 2},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


NUMBERS = schema({"type": "integer", "minimum": 0, "maximum": 99_999})
TEXTS = schema({"enum": ["none", "few", "many"]})


def write(place: Place, shape: Mapping[str, Any]) -> Path:
    return place.job(
        "engine: {max_num_seqs: 3}",
        "on_error: {max_error_rate: 0.5}",
        sampling="sampling: {max_tokens: 90, temperature: 1.0, seed: 1}",
        output=f"output: {json.dumps({'path': 'out/res', 'schema': shape, 'columns': ['text']})}",
    )


def check(rows: list[dict[str, Any]], shape: Mapping[str, Any]) -> int:
    """Return the number of complete answers, after checking that they are valid and in the columns."""
    names, whole = list(shape["properties"]), 0
    for row in rows:
        if row["status"] == "ok":
            answer = json.loads(row["generated_text"])
            jsonschema.validate(answer, shape)
            assert answer == {name: row[name] for name in names}
            whole += 1
        else:
            assert row["error_code"] == "incomplete_output"
            assert all(row[name] is None for name in names)
    return whole


@pytest.mark.slow
def test_a_killed_job_is_read_and_resumed(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is killed within answers, and so is the next one. Rows 0 … 3 are duplicates: each is
    sampled."""
    place.rows(*({"id": f"r{n}", "text": f"word {n}" if n > 3 else "same"} for n in range(16)))
    job = write(place, NUMBERS)
    monkeypatch.setenv("DIES_AFTER", "6")
    monkeypatch.setenv("DIED", str(place.folder / "died"))
    killed = cli_of(DYING)("run", job)
    assert killed.code == 71, killed.err
    query = cli_of(NO_ENGINE)
    shown = query("query", place.results, "select * from results", "--partial", "--json")
    assert shown.code == 0, shown.err
    partial = [json.loads(line) for line in shown.out.splitlines()]
    assert 6 <= len(partial) < 16
    assert check(partial, NUMBERS) > 3

    done = cli_of(REAL)("run", job)
    assert done.code == 0, done.err
    found = {row["custom_id"]: row for row in place.table()}
    assert last(place, "run")[0]["reused_requests"] == len(partial)
    assert check(list(found.values()), NUMBERS) > 8
    for row in partial:
        assert all(
            found[row["custom_id"]][name] == row[name]
            for name in ("generated_text", "count", "tags", "status")
        )
    assert len({found[f"r{n}"]["generated_text"] for n in range(4)}) > 1


@pytest.mark.slow
def test_a_job_with_another_schema_has_other_columns(place: Place, cli_of: CliOf) -> None:
    place.rows(*({"id": f"r{n}", "text": f"word {n}"} for n in range(6)))
    run, found = cli_of(REAL), []
    for shape, reused in ((NUMBERS, 0), (TEXTS, 0), (NUMBERS, 6)):
        done = run("run", write(place, shape), "--replace")
        assert done.code == 0, done.err
        assert last(place, "run")[0]["reused_requests"] == reused
        assert check(place.table(), shape) > 3
        found.append(place.table())
        (file,) = place.results.glob("*.parquet")
        kind = pa.int64() if shape is NUMBERS else pa.dictionary(pa.int32(), pa.string())
        assert pq.read_schema(file).field("count").type == kind
    assert found[0] == found[2], "answers of the first schema are still stored"


def test_a_tokenizer_without_constraints_is_reported_before_the_model_loads(
    place: Place, cli_of: CliOf
) -> None:
    """The job has a constraint. Rows with their own constraint are error rows, and others run."""
    validate = cli_of(NO_ENGINE)
    words().save(str(place.own_model() / "tokenizer.json"))
    place.rows({"id": "a", "text": "yes", "choice": ["no"]}, {"id": "b", "text": "no"})
    prompt = "prompt: {text: text}"
    told = validate("validate", place.job(prompt=prompt, sampling="sampling: {regex: a}"))
    assert told.code == 78
    assert "sampling.regex" in told.err
    assert "cannot read the tokenizer" in told.err
    job = place.job(prompt=prompt, sampling="sampling: {from_columns: [choice]}")
    told = validate("validate", job)
    assert "bad_constraint" in told.out + told.err
    assert "1 of 2" in told.out + told.err
