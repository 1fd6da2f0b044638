"""Runs whole jobs whose answers call tools.

Calls of all families become a column, lines of an OpenAI file have them, and required calls follow the tool's
schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest

from batchinfer.core.tool_calls import FoundCalls
from batchinfer.input.tool_calls.formats import FORMATS
from tests.batchinfer.test_reasoning_job import fenced
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Place, make_place
from tests.scripted_engine import SCRIPT
from tests.tool_models import TOOL_FAMILIES, make_tool_model, make_tool_tokenizer, written_calls

SCRIPTED = "tests.scripted_engine:build"
REAL = "batchinfer.engine.load.build:load_weights"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Aachen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "additionalProperties": False}}
FINAL = "<|channel|>final<|message|>"


def write(place: Place, **sections: Any) -> Path:
    given = {
        "prompt": {"user": "{{ text }}", "tools": TOOLS, "tools_from_column": "can"},
        "sampling": {"max_tokens": 400},
        "output": {"path": "out/res", "columns": ["text"]},
        "on_error": {"max_error_rate": 0.9},
        **sections,
    }
    return place.job(**{name: f"{name}: {json.dumps(value)}" for name, value in given.items()})


def script(place: Place, fast: Any, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine answer prompts that contain these texts."""

    def ids(text: str) -> list[int]:
        return list(fast.encode(text, add_special_tokens=False))

    file = place.folder / "script.json"
    file.write_text(json.dumps([(ids(asked), ids(answer)) for asked, answer in answers.items()]))
    monkeypatch.setenv(SCRIPT, str(file))


def called(name: str, calls: list[tuple[str, str]]) -> str:
    """Return an answer of the family with these calls."""
    if name == "gpt-oss":
        tool, given = calls[0]
        return f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{given}<|call|>"
    if name == "qwen3-coder":
        return "".join(
            f"<tool_call>\n<function={tool}>\n"
            + "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in json.loads(given).items())
            + "</function>\n</tool_call>"
            for tool, given in calls
        )
    return written_calls(name, calls)


SLOW = [name for name in TOOL_FAMILIES if name != "gpt-oss"]


@pytest.mark.parametrize("name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_calls_of_each_family_become_a_column(
    name: str, tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without tools make no calls. Reading calls computes nothing; a second run computes only rows with
    changed tools."""
    fast = make_tool_model(tmp_path / "model", name)
    place = make_place(tmp_path / "job", tmp_path / "model")
    own = [{"type": "function", "function": {"name": "own"}}]
    given = [
        {"id": "call", "text": "row call", "can": None},
        {"id": "own", "text": "row own", "can": own},
        {"id": "none", "text": "row none", "can": []},
        {"id": "text", "text": "row text", "can": None},
    ]
    place.rows(*given)
    weather = called(name, [("get_weather", '{"city": "Ulm", "days": 3}')])
    answers = {
        "row call": weather,
        "row own": called(name, [("own", "{}")]),
        "row none": weather,
        "row more": weather,
        "row text": (FINAL if name == "gpt-oss" else "") + "Nothing to call.",
    }
    script(place, fast, answers, monkeypatch)
    done = cli_of(SCRIPTED)("run", write(place))
    assert done.code == 0, done.err
    rows = {row["custom_id"]: row for row in place.table()}
    (call,) = rows["call"]["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Ulm", "days": 3})
    assert [one["name"] for one in rows["own"]["tool_calls"]] == ["own"]
    assert rows["call"]["generated_text"] is rows["own"]["generated_text"] is None
    assert rows["none"]["tool_calls"] == rows["text"]["tool_calls"] == []
    assert "Ulm" in (rows["none"]["generated_text"] or rows["none"]["reasoning"])
    assert rows["text"]["generated_text"] == "Nothing to call."
    place.rows({"id": "more", "text": "row more", "can": TOOLS[:1]}, *given)
    night = cli_of(SCRIPTED)("run", write(place), "--json")
    assert json.loads(night.out)["computed_requests"] == 1
    found = {row["custom_id"]: row for row in place.table()}
    assert [one["name"] for one in found.pop("more")["tool_calls"]] == ["get_weather"]
    assert {name: row["tool_calls"] for name, row in found.items()} == {
        name: row["tool_calls"] for name, row in rows.items()
    }
    if name == "gpt-oss":
        return
    again = cli_of(NO_ENGINE)
    assert again("run", write(place), "--set", "prompt.tool_calls=none").code == 0
    whole = {row["custom_id"]: row for row in place.table()}
    assert "tool_calls" not in whole["call"]
    assert "Ulm" in whole["call"]["generated_text"]
    prompt = {"user": "{{ text }}", "tools": TOOLS[:1], "tools_from_column": "can"}
    told = cli_of(SCRIPTED)("run", write(place, prompt=prompt), "--json")
    assert json.loads(told.out)["computed_requests"] == 2
    assert {row["custom_id"]: row["tool_calls"] for row in place.table()}["own"] == rows["own"]["tool_calls"]


def test_stored_answers_are_published_again_when_calls_are_read_in_another_way(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older result gets the calls that this version reads. The engine computes nothing."""
    fast = make_tool_model(tmp_path / "model", "llama3")
    place = make_place(tmp_path / "job", tmp_path / "model")
    place.rows({"id": "a", "text": "row a"})
    answer = 'I look.\n```json\n[{"name": "now", "parameters": {}}]\n```'
    script(place, fast, {"row": answer}, monkeypatch)
    job = write(place, prompt={"user": "{{ text }}", "tools": TOOLS})
    with monkeypatch.context() as earlier:
        earlier.setattr("batchinfer.core.tool_calls._VERSION", 1)
        earlier.setitem(FORMATS, "llama3", lambda text, _: FoundCalls(text, []))
        done = cli_of(SCRIPTED)("run", job)
        assert done.code == 0, done.err
        (row,) = place.table()
        assert (row["generated_text"], row["tool_calls"]) == (answer, [])
    done = cli_of(NO_ENGINE)("run", job)
    assert done.code == 0, done.err
    (row,) = place.table()
    assert (row["generated_text"], [one["name"] for one in row["tool_calls"]]) == ("I look.", ["now"])


@pytest.mark.slow
def test_an_unknown_style_is_reported_once(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool_model(tmp_path / "model", "qwen3")
    place = make_place(tmp_path / "job", tmp_path / "model")
    fast = make_tool_tokenizer(tmp_path / "other", "qwen3")
    place.rows({"id": "a", "text": "row a"}, {"id": "b", "text": "row b"})
    (place.folder / "plain.jinja").write_text("{{ tools }}{{ messages[0].content }}")
    script(place, fast, {"row": '<tool_call>{"name": "f"}</tool_call>'}, monkeypatch)
    prompt = {"user": "{{ text }}", "tools": TOOLS, "chat_template": "plain.jinja"}
    run = cli_of(SCRIPTED)
    done = run("run", write(place, prompt=prompt))
    assert done.code == 0, done.err
    assert done.err.count("name the style in prompt.tool_calls") == 1
    assert "tool_calls" not in place.table()[0]
    done = run("run", write(place, prompt={**prompt, "tool_calls": "hermes"}))
    assert "name the style" not in done.err
    assert [one["name"] for row in place.table() for one in row["tool_calls"]] == ["f", "f"]
    without = {"user": "{{ text }}", "tool_calls": "hermes", "chat_template": "plain.jinja"}
    assert run("run", write(place, prompt=without)).code == 0
    assert [one["name"] for row in place.table() for one in row["tool_calls"]] == ["f", "f"]


def chat(name: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"row {name}"}], "max_tokens": 400, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.slow
def test_lines_of_an_openai_file_have_calls(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without tools in its requests has no column for calls."""
    make_tool_model(tmp_path / "model", "qwen3")
    place = make_place(tmp_path / "job", tmp_path / "model")
    fast = make_tool_tokenizer(tmp_path / "other", "qwen3")
    two = [("get_weather", '{"city": "Ulm", "days": 3}'), ("now", "{}")]
    answers = {"row a": called("qwen3", two), "row b": "I look.\n" + called("qwen3", two[:1]), "row c": "No."}
    script(place, fast, answers, monkeypatch)
    sections = {"input": {"path": "rows.jsonl", "format": "openai"}, "output": {"path": "out/res"}}
    job = write(place, **sections, prompt={"tool_calls": "auto"}, sampling={})
    out = place.folder / "answers.jsonl"
    place.rows(chat("a"), chat("b"))
    run = cli_of(SCRIPTED)
    done = run("run", job, "--to-openai", out)
    assert done.code == 0, done.err
    assert "tool_calls" not in place.table()[0]
    place.rows(chat("a", tools=TOOLS), chat("b", tools=TOOLS), chat("c", tools=TOOLS), chat("d"))
    done = run("run", job, "--to-openai", out, "--replace")
    assert done.code == 0, done.err
    choices = [json.loads(line)["response"]["body"]["choices"][0] for line in out.read_text().splitlines()]
    assert [one["finish_reason"] for one in choices] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert [one["message"]["content"] for one in choices[:3]] == [None, "I look.", "No."]
    found = [one["message"].get("tool_calls") for one in choices]
    assert found[2:] == [None, None]
    assert [one["type"] for one in found[0]] == ["function", "function"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in found[0]] == two
    assert len({one["id"] for calls in found[:2] for one in calls}) == 3


def test_the_job_of_the_page_runs_and_its_query_is_answered(
    tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = make_tool_model(tmp_path / "models/qwen3-8b", "qwen3")
    (tmp_path / "job.yaml").write_text(fenced("tools.md", "yaml")[0])
    (questions,) = fenced("tools.md", "json")
    (tmp_path / "questions.jsonl").write_text(questions)
    answers = {
        city: f"<think>\nhm\n</think>\n\n{called('qwen3', [('get_weather', json.dumps({'city': city}))])}"
        for city in ("Ulm", "Aachen")
    }
    script(make_place(tmp_path / "place", tmp_path / "models/qwen3-8b"), fast, answers, monkeypatch)
    done = cli_of(SCRIPTED)("run", tmp_path / "job.yaml")
    assert done.code == 0, done.err
    monkeypatch.chdir(tmp_path)
    (sql,) = fenced("tools.md", "sql")
    assert sorted(duckdb.sql(sql).fetchall()) == [("get_weather", "Aachen", 1), ("get_weather", "Ulm", 1)]


@pytest.mark.parametrize("name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_required_calls_follow_the_schema_of_their_tool(name: str, tmp_path: Path, cli_of: CliOf) -> None:
    """A random model is forced to call: the requested tools, in the requested number."""
    make_tool_model(tmp_path / "model", name)
    place = make_place(tmp_path / "job", tmp_path / "model")
    named = {"type": "function", "function": {"name": "get_weather"}}
    warm: dict[str, Any] = {"tools": TOOLS, "temperature": 1.0, "thinking_budget": 8}
    if name not in ("gpt-oss", "qwen3"):
        del warm["thinking_budget"]
    text = {"type": "json_object"}
    place.rows(
        *(chat(f"required {n}", **warm, tool_choice="required", seed=n) for n in range(3)),
        *(chat(f"named {n}", **warm, tool_choice=named, seed=n) for n in range(3)),
        *(
            chat(f"single {n}", **warm, tool_choice="required", parallel_tool_calls=False, seed=n)
            for n in range(2)
        ),
        chat("lacking", **warm, tool_choice={"type": "function", "function": {"name": "other"}}),
        chat("wrong", **warm, tool_choice="any"),
        chat("both", **warm, tool_choice="required", response_format=text),
        chat("free", **warm, parallel_tool_calls=False),
    )
    sections: dict[str, Any] = {
        "input": {"path": "rows.jsonl", "format": "openai"},
        "output": {"path": "out/res"},
    }
    sections |= {"prompt": {"tool_calls": "auto"}, "sampling": {}, "on_error": {"max_error_rate": 1}}
    job = write(place, **sections)
    done = cli_of(REAL)("run", job)
    assert done.code == 0, done.err
    rows = {row["custom_id"]: row for row in place.table()}
    if name == "qwen3-coder":
        assert {row["status"] for row in rows.values()} == {"error"}
        assert "in the style qwen3-coder cannot be asked for" in rows["required 0"]["error_message"]
        return
    for asked, words in {"lacking": "no tool 'other'", "wrong": "must be none", "both": "only one"}.items():
        assert words in rows.pop(asked)["error_message"]
    assert "nothing keeps a model from several" in rows.pop("free")["error_message"]
    for asked, row in rows.items():
        if row["error_code"] == "incomplete_output":
            assert asked.startswith("required"), row["error_message"]
            continue
        assert row["status"] == "ok", row["error_message"]
        assert row["tool_calls"], row
        assert row["generated_text"] is None
        for call in row["tool_calls"]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        if not asked.startswith("required"):
            assert len(row["tool_calls"]) == 1
        if asked.startswith("named"):
            assert row["tool_calls"][0]["name"] == "get_weather"


def test_a_job_can_require_calls(tmp_path: Path, cli_of: CliOf) -> None:
    make_tool_model(tmp_path / "model", "qwen3")
    place = make_place(tmp_path / "job", tmp_path / "model")
    place.rows(
        {"id": "a", "text": "row a", "can": None},
        {"id": "b", "text": "row b", "can": TOOLS[:1]},
        {"id": "none", "text": "row none", "can": []},
        {"id": "other", "text": "row other", "can": TOOLS[1:]},
    )
    prompt = {"user": "{{ text }}", "tools": TOOLS, "tools_from_column": "can", "tool_choice": "get_weather"}
    run = cli_of(REAL)
    done = run(
        "run", write(place, prompt=prompt, sampling={"max_tokens": 400, "temperature": 1.0, "seed": 1})
    )
    assert done.code == 0, done.err
    rows = {row["custom_id"]: row for row in place.table()}
    for name in "ab":
        (call,) = rows[name]["tool_calls"]
        assert call["name"] == "get_weather"
        jsonschema.validate(json.loads(call["arguments"]), WEATHER)
    assert "there are no tools" in rows["none"]["error_message"]
    assert "no tool 'get_weather'" in rows["other"]["error_message"]
