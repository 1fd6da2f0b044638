"""Runs a batch with all features of reasoning rows, and kills, resumes and changes it.

Rows have template arguments, budgets, schemas after the reasoning, an end of loops and further attempts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.batchinfer.test_reasoning_job import DYING, REAL, SCHEMA, tables_of
from tests.batchinfer.wrong_jobs import CliOf, Place, make_place
from tests.reasoning_models import make_reasoning_model
from tests.tool_models import make_tool_model

SHARED = "You count what the customer says, and tell whether you are sure of it. "
ROWS = [
    {"id": f"r{n}", "text": f"word {n}", "think": (None, False, True)[n % 3]}
    | ({"most": 6} if n % 4 == 1 else {})
    for n in range(12)
]


def write(place: Place, **arguments: Any) -> Path:
    sections = {
        "prompt": {"system": SHARED * 3, "user": "{{ text }}", "template_arguments": arguments or None,
            "template_arguments_from_columns": {"enable_thinking": "think"}},
        "sampling": {"max_tokens": 60, "temperature": 1.0, "seed": 4, "thinking_budget": 12, "repetition_stop": 16,
            "from_columns": {"max_tokens": "most"}},
        "on_invalid": [{"temperature": 0.7, "seed": 1}, {"max_tokens": 400}],
        "output": {"path": "out/res", "schema": SCHEMA, "columns": ["think"]},
        "engine": {"max_num_seqs": 4, "block_size": 8, "deterministic": True},
        "on_error": {"max_error_rate": 0.9},
    }  # fmt: skip
    return place.job(**{name: f"{name}: {json.dumps(value)}" for name, value in sections.items()})


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert 0 <= row["reasoning_tokens"] <= 12
        if row["status"] == "ok":
            jsonschema.validate(json.loads(row["generated_text"]), SCHEMA)
        if row["think"] is False:
            assert row["reasoning"] is None
    assert {row["status"] for row in rows} == {"ok"}, "the last attempt has room for all"
    short = [row for row in rows if int(row["custom_id"][1:]) % 4 == 1]
    assert {row["attempt"] for row in short} == {3}, "six tokens are too few"
    assert 1 in {row["attempt"] for row in rows}


@pytest.mark.slow
def test_all_features_of_reasoning_rows_in_one_batch(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reasoning_model(tmp_path / "model", "qwen3")
    whole, killed = (make_place(tmp_path / name, tmp_path / "model") for name in ("whole", "killed"))
    for place in (whole, killed):
        place.rows(*ROWS)
    run = cli_of(REAL)
    done = run("run", write(whole))
    assert done.code == 0, done.err
    first = whole.table()
    check(first)

    monkeypatch.setenv("DIES_AFTER", "4")
    monkeypatch.setenv("DIED", str(killed.folder / "died"))
    assert cli_of(DYING)("run", write(killed)).code == 71
    run = cli_of(REAL)
    assert run("run", write(killed)).code == 0
    assert tables_of(killed) == tables_of(whole)

    told = run("run", write(whole, enable_thinking=False), "--json")
    assert told.code == 0, told.err
    second = whole.table()
    check(second)
    changed = [one["custom_id"] for one, other in zip(first, second, strict=True) if one != other]
    unsaid = [row["id"] for row in ROWS if row["think"] is None]
    assert set(changed) <= set(unsaid)
    assert json.loads(told.out)["reused_requests"] >= len(ROWS) - len(unsaid)


TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": {"type": "object",
        "properties": {"most": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["most"]}}},
]  # fmt: skip


COUNT = 8  # requests


def request(number: int) -> dict[str, Any]:
    """Return one of four kinds of requests: a call, a schema, only a budget, or a budget without reasoning."""
    kinds: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sure", "schema": SCHEMA}}},
        {"max_tokens": 40},
        {"max_tokens": 40, "chat_template_kwargs": {"enable_thinking": False}},
    ]
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": f"word {number // 4}"}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 1.0, "seed": 4, "thinking_budget": 12}
    body |= {"repetition_stop": 16, **kinds[number % 4]}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_calls_of_tools_in_one_batch_with_schemas_budgets_and_a_ladder(tmp_path: Path, cli_of: CliOf) -> None:
    """Requests of all kinds share a prefix, and run again if their answers are truncated."""
    make_tool_model(tmp_path / "model", "qwen3")
    sections: dict[str, Any] = {
        "input": {"path": "rows.jsonl", "format": "openai"},
        "prompt": {"tool_calls": "auto"},
        "sampling": {},
        "on_invalid": [{"temperature": 0.7, "seed": 1}, {"max_tokens": 200}],
        "output": {"path": "out/res"},
        "engine": {"max_num_seqs": 4, "block_size": 8, "deterministic": True},
        "on_error": {"max_error_rate": 0.9},
    }
    place = make_place(tmp_path / "job", tmp_path / "model")
    place.rows(*map(request, range(COUNT)))
    job = place.job(**{name: f"{name}: {json.dumps(value)}" for name, value in sections.items()})
    done = cli_of(REAL)("run", job)
    assert done.code == 0, done.err
    rows = place.table()
    for number, row in enumerate(rows):
        assert row["reasoning_tokens"] <= 12
        if number % 4 == 0 and row["status"] == "ok":
            (call,) = row["tool_calls"]
            assert 1 <= json.loads(call["arguments"])["most"] <= 9
        if number % 4 == 1 and row["status"] == "ok":
            jsonschema.validate(json.loads(row["generated_text"]), SCHEMA)
        if number % 4 == 3:
            assert row["reasoning"] is None
    assert {row["status"] for row in rows[::4]} == {row["status"] for row in rows[1::4]} == {"ok"}
    assert max(row["attempt"] for row in rows) > 1
