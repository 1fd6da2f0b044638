"""Runs jobs with a reasoning checkpoint and a schema after the reasoning, next to rows without reasoning.

They are killed, read, resumed, and written as an OpenAI file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest

from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Place, make_place
from tests.reasoning_models import REASONING_FAMILIES, make_reasoning_model

REAL = "batchinfer.engine.load.build:load_weights"
DYING = "tests.batchinfer.dying_engine:build"
DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 999}, "sure": {"type": "boolean"}},
    "required": ["count", "sure"],
}
ROWS = [{"id": f"r{n}", "text": f"word {n // 2}" + ("" if n % 3 else " /no_think")} for n in range(12)]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    make_reasoning_model(folder, "nemotron")
    return folder


@pytest.fixture
def place(tmp_path: Path, thinker: Path) -> Place:
    found = make_place(tmp_path / "job", thinker)
    found.rows(*ROWS)
    return found


def write(place: Place, **sections: Any) -> Path:
    given = {
        "sampling": {"max_tokens": 150, "temperature": 1.0, "seed": 4},
        "output": {"path": "out/res", "schema": SCHEMA, "columns": ["text"]},
        "engine": {"max_num_seqs": 3, "deterministic": True},
        "on_error": {"max_error_rate": 0.9},
        **sections,
    }
    return place.job(**{name: f"{name}: {json.dumps(value)}" for name, value in given.items()})


def tables_of(place: Place) -> list[bytes]:
    return [data for name, data in place.published().items() if name.endswith(".parquet")]


def check(rows: list[dict[str, Any]]) -> list[str]:
    """Return the outcome of each row, after checking that complete answers are valid with or without
    reasoning."""
    found = []
    for row in rows:
        thinks = "/no_think" not in row["text"]
        assert row["reasoning"] is None or (thinks and row["reasoning"])
        if row["status"] == "error":
            assert row["error_code"] == "incomplete_output"
            assert row["reasoning_tokens"] is row["count"] is None
            found.append("truncated")
            continue
        answer = json.loads(row["generated_text"])
        jsonschema.validate(answer, SCHEMA)
        assert (row["count"], row["sure"]) == (answer["count"], answer["sure"])
        assert "</think>" not in row["generated_text"] + (row["reasoning"] or "")
        assert 0 <= row["reasoning_tokens"] < row["completion_tokens"]
        assert thinks or row["reasoning_tokens"] == 0
        found.append("thought" if thinks else "direct")
    return found


@pytest.mark.slow
def test_a_schema_follows_the_reasoning_and_a_killed_job_ends_with_the_same_bytes(
    place: Place, tmp_path: Path, thinker: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_place(tmp_path / "whole", thinker)
    whole.rows(*ROWS)
    assert cli_of(REAL)("run", write(whole)).code == 0
    assert {"thought", "direct"} <= set(check(whole.table()))

    job = write(place)
    monkeypatch.setenv("DIES_AFTER", "4")
    monkeypatch.setenv("DIED", str(place.folder / "died"))
    assert cli_of(DYING)("run", job).code == 71
    query = cli_of(NO_ENGINE)
    shown = query("query", place.results, "select * from results", "--partial", "--json")
    assert shown.code == 0, shown.err
    partial = [json.loads(line) for line in shown.out.splitlines()]
    assert 4 <= len(partial) < len(ROWS)
    check(partial)
    done = cli_of(REAL)("run", job)
    assert done.code == 0, done.err
    assert tables_of(place) == tables_of(whole)
    same = query("diff", place.results, whole.results)
    assert same.code == 0, same.out + same.err


def test_adding_and_removing_reasoning_columns_computes_nothing(place: Place, cli_of: CliOf) -> None:
    """Answers without a constraint are unchanged by splitting, and no text occurs twice."""
    output = {"path": "out/res", "columns": ["text"]}
    job = write(place, output=output, sampling={"max_tokens": 60, "temperature": 1.0, "seed": 1})
    assert cli_of(REAL)("run", job).code == 0
    split = place.table()
    assert {row["status"] for row in split} == {"ok"}
    assert any(row["reasoning"] and row["generated_text"] for row in split)
    assert any(row["reasoning"] and row["generated_text"] is None for row in split)
    again = cli_of(NO_ENGINE)
    assert again("run", job, "--set", "prompt.reasoning=none").code == 0
    whole = place.table()
    for one, other in zip(split, whole, strict=True):
        assert list(other) == [name for name in one if name not in ("reasoning", "reasoning_tokens")]
        assert one["completion_tokens"] == other["completion_tokens"]
        text, inside = one["generated_text"], one["reasoning"]
        if "/no_think" in one["text"]:
            assert inside is None
            assert other["generated_text"] == text
        else:
            before, _, behind = other["generated_text"].partition("</think>")
            assert (before.strip(), behind.lstrip()) == (inside or "", (text or "").lstrip())


@pytest.mark.slow
@pytest.mark.parametrize("name", REASONING_FAMILIES)
def test_every_family_answers_under_a_schema_and_a_budget(name: str, tmp_path: Path, cli_of: CliOf) -> None:
    """Granite's markers are text: its answers are constrained from the first token, without a budget."""
    make_reasoning_model(tmp_path / "model", name)
    place = make_place(tmp_path / "job", tmp_path / "model")
    place.rows(*ROWS)
    sampling = {"max_tokens": 150, "temperature": 1.0} | (
        {} if name == "granite" else {"thinking_budget": 15}
    )
    done = cli_of(REAL)("run", write(place, sampling=sampling))
    assert done.code == 0, done.err
    rows = place.table()
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        jsonschema.validate(json.loads(row["generated_text"]), SCHEMA)
        assert 0 <= row["reasoning_tokens"] <= 15
        assert "analysis" not in (row["reasoning"] or "")
    if name in ("deepseek-r1", "nemotron"):
        assert any(row["reasoning"] for row in rows)


def chat(name: str, content: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 150, "temperature": 1.0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_an_openai_file_has_the_reasoning(place: Place, cli_of: CliOf) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    text = {"custom_id": "text", "method": "POST", "url": "/v1/completions"}
    place.rows(
        *(chat(f"think {n}", f"word {n}") for n in range(2)),
        *(chat(f"shape {n}", f"word {n}", response_format=shape) for n in range(2)),
        chat("direct", "word /no_think"),
        text | {"body": {"prompt": "<think>so", "max_tokens": 5}},
    )
    job = write(
        place,
        input={"path": "rows.jsonl", "format": "openai"},
        output={"path": "out/res"},
        sampling={},
        prompt={"reasoning": "auto"},
    )
    out = place.folder / "answers.jsonl"
    done = cli_of(REAL)("run", job, "--to-openai", out)
    assert done.code == 0, done.err
    found = 0
    for line, row in zip(map(json.loads, out.read_text().splitlines()), place.table(), strict=True):
        if line["response"] is None:
            assert line["error"]["code"] == "incomplete_output"
            continue
        body = line["response"]["body"]
        counts = body["usage"]["completion_tokens_details"]
        assert counts == {"reasoning_tokens": row["reasoning_tokens"]}
        choice = body["choices"][0]
        if row["custom_id"] == "text":
            assert choice["text"] == (row["generated_text"] or "")
            continue
        message = choice["message"]
        assert message["reasoning_content"] == row["reasoning"]
        assert message["content"] == row["generated_text"]
        assert (message["reasoning_content"] is None) == (row["custom_id"] == "direct")
        if row["custom_id"].startswith("shape"):
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
        found += 1
    assert found > 2


def test_a_budget_ends_the_reasoning_of_the_job_and_of_rows(place: Place, cli_of: CliOf) -> None:
    budgets = [None, 0, 5, None, 9, None]
    place.rows(*(row | {"budget": budget} for row, budget in zip(ROWS, budgets, strict=False)))
    columns = {"from_columns": {"thinking_budget": "budget"}}
    sampling = {"max_tokens": "fit", "temperature": 1.0, "seed": 4, "thinking_budget": 20, **columns}
    job = write(place, sampling=sampling)
    checked = cli_of(NO_ENGINE)("validate", job)
    assert "an answer has at most" in checked.out
    done = cli_of(REAL)("run", job)
    assert done.code == 0, done.err
    rows = place.table()
    assert set(check(rows)) == {"thought", "direct"}  # there is room for all, however long they reason
    for row, budget in zip(rows, budgets, strict=True):
        assert row["reasoning_tokens"] <= (20 if budget is None else budget)
    assert max(row["reasoning_tokens"] for row in rows) > 0


def test_columns_of_the_result_keep_their_names(place: Place, cli_of: CliOf) -> None:
    shape = {"type": "object", "properties": {"reasoning": {"type": "string"}}, "required": ["reasoning"]}
    run = cli_of(NO_ENGINE)
    for output in ({"path": "out/res", "schema": shape}, {"path": "out/res", "columns": ["reasoning"]}):
        place.rows({"text": "a", "reasoning": "b", "id": "c"})
        done = run("run", write(place, output=output))
        assert done.code == 78
        assert "set prompt.reasoning to none" in done.err
        assert run("validate", write(place, output=output), "--set", "prompt.reasoning=none").code == 0


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def test_the_job_of_the_page_runs_and_the_queries_are_answered(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reasoning_model(tmp_path / "models/qwen3-8b", "qwen3")
    (tmp_path / "job.yaml").write_text(fenced("reasoning.md", "yaml")[0])
    (questions,) = fenced("reasoning.md", "json")
    (tmp_path / "questions.jsonl").write_text(questions * 2)
    run = cli_of(REAL)
    small = ("sampling.thinking_budget=40", "sampling.temperature=1.5", "on_error.max_error_rate=1")
    done = run("run", tmp_path / "job.yaml", *(word for one in small for word in ("--set", one)))
    assert done.code == 0, done.err
    monkeypatch.chdir(tmp_path)
    (sql,) = fenced("reasoning.md", "sql")
    assert sum(row[1] for row in duckdb.sql(sql).fetchall()) == 4
    for query in (sql for sql in fenced("cookbook.md", "sql") if "reasoning" in sql):
        found = run("query", "results/sums", query, "--json")
        assert found.code == 0, found.err
        assert found.out or "IS NULL" in query
