"""Runs whole jobs whose rows have tools, and conversations with earlier calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.batchinfer.pipeline.test_pipeline import people, table, write_job
from tests.batchinfer.test_template_arguments_job import prompts, run, tell
from tests.batchinfer.test_to_openai import chat

# How published templates print earlier calls: Qwen2.5 and Hermes, Qwen3, DeepSeek-V3
CALLS = {
    "object": "{{ call.function.arguments | tojson }}",
    "either": "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}",
    "text": "{{ call['function']['name'] + '\\n' + call['function']['arguments'] }}",
    "items": "{% for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}",
}
CHAT = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL{% endfor %} {% endfor %}"
)
PROMPT: dict[str, Any] = {"system": None, "chat_template": "chat.jinja"}


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema, **function}}


def job(
    folder: Path, model: Path, rows: list[Any] | None, call: str = CALLS["either"], **sections: Any
) -> Path:
    (folder / "chat.jinja").write_text(CHAT.replace("CALL", call))
    return write_job(folder, model, rows, **sections)


def test_the_jobs_tools_the_rows_own_and_the_second_night(tmp_path: Path, model: Path) -> None:
    """A run computes only rows with changed tools."""
    own: tuple[Any, ...] = (None, [tool("own")], json.dumps([tool("text")]), [])
    rows = [row | {"can": given} for row, given in zip(people(4), own, strict=True)]
    path = job(tmp_path, model, rows, prompt={**PROMPT, "tools": [tool()], "tools_from_column": "can"})
    assert prompts(path) == [
        "<add>user:Greet person 0 ",
        "<own>user:Greet person 1 ",
        "<text>user:Greet person 2 ",
        "user:Greet person 3 ",
    ]
    assert run(path)[0].row["computed_requests"] == 4
    job(tmp_path, model, rows, prompt={**PROMPT, "tools": [tool("sub")], "tools_from_column": "can"})
    again = run(path)[0].row
    assert (again["computed_requests"], again["reused_requests"]) == (1, 3)


def test_requests_have_tools_and_wrong_ones_are_error_rows(tmp_path: Path, model: Path) -> None:
    deep: Any = {}
    for _ in range(80):
        deep = {"properties": deep}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": "add"}, "must be a list"),
        ({"tools": [tool("__class__ ")]}, r"[0].function.name must be 1 to 64"),
        ({"tools": [tool(), tool()]}, "'add' is the name of an earlier tool"),
        ({"tools": [tool(parameters={"type": "array"})]}, "Schema of an object"),
        ({"tools": [tool(parameters={"type": "object", **deep})]}, "nested more than 64 deep"),
        ({"tools": [tool(description="x" * 5_000_000)]}, "over the limit"),
        ({"tools": [tool(str(n)) for n in range(129)]}, "129 tools; the limit is 128"),
        ({"tools": [tool()], "tool_choice": "required"}, "calls of unknown style cannot be asked for"),
        ({"tools": [tool()], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ]
    right = [
        chat("a", tools=[tool("__class__")], parallel_tool_calls=True),
        chat("b"),
        chat("c", tool_choice="none"),
        chat("d", tools=[tool()], tool_choice="auto"),
    ]
    rows = [*right, *(chat(f"w{n}", **body) for n, (body, _) in enumerate(wrong))]
    path = job(tmp_path, model, rows, prompt=None, on_error={"max_error_rate": 0.9})
    tell(path, chat_template="chat.jinja", tools=[tool("job")])
    assert prompts(path)[:4] == [
        "<__class__>user:hello a ",
        "<job>user:hello b ",
        "user:hello c ",
        "<add>user:hello d ",
    ]
    assert run(path)[0].exit_code == 0
    found = table(path, "status, error_message")
    assert [row["status"] for row in found] == ["ok"] * 4 + ["error"] * len(wrong)
    for row, (_, words) in zip(found[4:], wrong, strict=True):
        assert words in row["error_message"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("given", [{"city": "Ulm"}, '{"city": "Ulm"}'])
def test_earlier_calls_are_printed_in_every_form(tmp_path: Path, model: Path, form: str, given: Any) -> None:
    """Arguments are an object or JSON text; each template gets the form that it can print."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": given}}
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    path = job(
        tmp_path, model, [{"talk": talk}], CALLS[form], prompt={**PROMPT, "user": None, "messages": "talk"}
    )
    text = {"text": 'add\n{"city": "Ulm"}', "items": "<city>Ulm"}.get(form, '{"city": "Ulm"}')
    assert prompts(path) == [f"user:hi assistant:{text} tool:7 "]


@pytest.mark.sample(1)
@pytest.mark.parametrize("calls", [
    "x",
    [3],
    [{}],
    [{"function": {"name": "f", "arguments": "{not"}}],
    [{"function": {"name": "f", "arguments": 7}}],
])  # fmt: skip
def test_an_invalid_call_is_an_error_row(tmp_path: Path, model: Path, calls: Any) -> None:
    rows = [chat("a"), chat("b", messages=[{"role": "assistant", "content": "", "tool_calls": calls}])]
    path = job(tmp_path, model, rows, prompt=None, on_error={"max_error_rate": 0.9})
    tell(path, chat_template="chat.jinja")
    run(path)
    assert [row["error_code"] for row in table(path)] == [None, "prompt_type"]
