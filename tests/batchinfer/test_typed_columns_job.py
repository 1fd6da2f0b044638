"""Runs jobs with `output.schema` in parallel with other jobs, and with answers of other kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.batchinfer.wrong_jobs import CliOf, Command, Place

ONE = {"type": "object", "properties": {"n": {"const": 2**40}}, "required": ["n"]}
SHAPE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
OTHER = {"type": "object", "properties": {"m": {"enum": [1, 2]}}, "required": ["m"]}


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of("batchinfer.engine.load.build:load_weights")


@pytest.mark.slow
def test_answers_with_and_without_typed_columns_are_not_shared(
    place: Place, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer stored without columns could not be published with them. An answer that does not fit its
    column is no error without columns."""

    def too_large(_: object) -> int:
        raise ValueError("the whole number takes more than 32 bits")

    monkeypatch.setattr("batchinfer.store.columns.column_kinds._integer", too_large)
    place.rows({"id": "a", "text": "hello"})
    plain = {"sampling": f"sampling: {json.dumps({'max_tokens': 60, 'json_schema': ONE})}"}
    typed = {
        "sampling": "sampling: {max_tokens: 60}",
        "output": f"output: {json.dumps({'path': 'out/res', 'schema': ONE})}",
    }
    for sections, code in ((plain, None), (typed, "unfit_output"), (plain, None)):
        place.job("on_error: {max_error_rate: 1.0}", **sections)
        done = run("run", place.folder / "job.yaml", "--replace")
        assert done.code == 0, done.err
        (row,) = place.table()
        assert row["error_code"] == code
        assert json.loads(row["generated_text"]) == {"n": 2**40}


def test_a_request_has_the_schema_of_the_job_or_is_an_error(place: Place, run: Command) -> None:
    def asking(number: int, more: dict[str, Any]) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, **more}
        return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    def formatted(schema: dict[str, Any]) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    fine = [{}, {"response_format": {"type": "text"}}, formatted(SHAPE)]
    others = [formatted(OTHER), {"response_format": {"type": "json_object"}}, {"choice": ["a"]}]
    place.rows(*(asking(n, more) for n, more in enumerate([*fine, *others])), name="batch.jsonl")
    place.job(
        "on_error: {max_error_rate: 1.0}",
        input="input: {path: batch.jsonl, format: openai}",
        prompt="",
        sampling="sampling: {temperature: 0}",
        output=f"output: {json.dumps({'path': 'out/res', 'schema': SHAPE})}",
    )
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    rows = place.table()
    assert all(row["n"] in (1, 2) for row in rows[: len(fine)])
    refused = rows[len(fine) :]
    assert [row["error_code"] for row in refused] == ["bad_parameter"] * len(others)
    assert all("output.schema" in row["error_message"] for row in refused)
