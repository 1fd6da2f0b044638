"""Runs whole jobs with template arguments: for all rows, by column, in OpenAI requests, or without a
template."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.report.progress import Progress
from batchinfer.verbs.preview import preview_job
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.input.prompts.chat_families import FAMILIES
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, table, write_job
from tests.batchinfer.test_to_openai import chat, completion

CHAT = (
    "{% if enable_thinking is defined and enable_thinking is false %}off {% endif %}{{ effort }}"
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    "{% for m in messages %} {{ m.content }}{% endfor %}"
)
JOB: dict[str, Any] = {"system": None, "chat_template": "chat.jinja"}


def job(folder: Path, model: Path, rows: list[Any] | None, source: str = CHAT, **sections: Any) -> Path:
    (folder / "chat.jinja").write_text(source)
    return write_job(folder, model, rows, **sections)


def tell(path: Path, **section: Any) -> None:
    """Give a job over OpenAI requests a prompt section."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt": section}))


def prompts(path: Path, *sets: tuple[str, str]) -> list[str | None]:
    return [row.text for row in preview_job(load_job(path, sets), 20, lambda _: None)]


def run(path: Path, options: RunOptions = FAKE, *sets: tuple[str, str]) -> tuple[Outcome, list[str]]:
    notices: list[str] = []
    progress = Progress(io.StringIO(), quiet=True)
    outcome = run_job(load_job(path, sets), options, progress, Interrupts(), notices.append)
    return outcome, notices


def test_arguments_of_all_rows_and_of_some_and_the_second_night(tmp_path: Path, model: Path) -> None:
    """A run computes only rows whose prompts the arguments change."""
    rows = [row | {"think": (True, False, None)[i % 3]} for i, row in enumerate(people(12))]
    columns = {"template_arguments_from_columns": {"enable_thinking": "think"}}
    path = job(tmp_path, model, rows, prompt={**JOB, **columns, "template_arguments": {"effort": "low"}})
    assert run(path)[0].row["computed_requests"] == 12
    off = ("prompt.template_arguments.enable_thinking", "false")  # what rows say themselves counts more
    assert prompts(path, off)[:3] == [
        "low Greet person 0",
        "off low Greet person 1",
        "off low Greet person 2",
    ]
    changed, _ = run(path, FAKE, off)
    assert (changed.row["computed_requests"], changed.row["reused_requests"]) == (4, 8)
    assert len(table(path)) == 12


@pytest.mark.slow
def test_the_template_file_is_a_part_of_the_work_and_its_name_is_not(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path, model, people(3), prompt=JOB)
    run(path)
    (tmp_path / "other.jinja").write_text(CHAT)
    assert run(path, NO_ENGINE, ("prompt.chat_template", "other.jinja"))[0].exit_code == 0
    (tmp_path / "other.jinja").write_text(CHAT + "{# changed #}")
    assert run(path, FAKE, ("prompt.chat_template", "other.jinja"))[0].row["computed_requests"] == 3


def test_openai_requests_have_template_arguments_and_unread_ones_are_counted(
    tmp_path: Path, model: Path
) -> None:
    rows = [
        chat("a", chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True}),
        chat("b", chat_template_kwargs={"thinking": True, "effort": "high"}, reasoning_effort="low"),
        chat("c", documents=[{"title": "T"}], chat_template_kwargs={"thinking": 1}),
        chat("d", chat_template_kwargs={"messages": []}),
        completion("e"),
        chat("f"),
    ]
    path = job(tmp_path, model, rows, prompt=None, on_error={"max_error_rate": 0.5})
    tell(path, chat_template="chat.jinja", template_arguments={"effort": "low"})
    assert prompts(path) == [
        "off low hello a", "high hello b", "low[T] hello c", None, "e", "low hello f",
    ]  # fmt: skip
    outcome, notices = run(path)
    assert outcome.exit_code == 0
    said = [line for line in notices if "does not read" in line]
    assert said == [
        "the chat template does not read arguments that rows give it, which were ignored: 'thinking' (2 rows), "
        "'reasoning_effort' (1 row)"
    ]
    assert [row["error_code"] for row in table(path)] == [None, None, None, "bad_parameter", None, None]
    assert "messages: every chat template has this name" in table(path, "error_message")[3]["error_message"]
    assert said[0] in validate_job(load_job(path))
    for verb in (lambda tell: list(preview_job(load_job(path), 20, tell)), lambda tell: _planned(path, tell)):
        heard: list[str] = []
        verb(heard.append)
        assert said[0] in heard


def _planned(path: Path, notice: Any) -> None:
    forecast_job(load_job(path), lambda _: None, notice)


def test_a_checkpoint_without_a_template_takes_no_arguments(tmp_path: Path, model: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (bare / file.name).write_bytes(file.read_bytes())
    path = job(tmp_path, bare, [chat("a")], prompt=None)
    tell(path, template_arguments={"a": 1})
    with pytest.raises(JobFileError, match=r"template_arguments\.a: .*no chat template that could read it"):
        run(path, NO_ENGINE)
    tell(path, chat_template="chat.jinja", template_arguments={"effort": "x"})
    assert prompts(path) == ["x hello a"]


def test_validate_lists_the_arguments_of_the_template(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path, model, people(2), FAMILIES["gpt-oss"].source, prompt=JOB)
    assert (
        "chat template: reads the arguments builtin_tools, model_identity, reasoning_effort"
        in validate_job(load_job(path))
    )


def test_columns_of_parquet_and_of_csv(tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        'text,think,documents\na,FALSE,"[{""title"": ""T""}]"\nb,true,\nc,,[\n', encoding="utf-8"
    )
    columns = {"enable_thinking": "think", "documents": "documents"}
    told = {**JOB, "template_arguments_from_columns": columns}
    path = job(tmp_path, model, None, prompt=told, input={"path": "rows.csv"})
    assert prompts(path) == ["off [T] Greet a", " Greet b", None]
    documents = [[{"title": "T", "n": 1}], None, []]
    rows = {"text": ["a", "b", "c"], "think": [False, True, None], "documents": documents}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    path = job(tmp_path, model, None, prompt=told, input={"path": "rows.parquet"})
    assert prompts(path) == ["off [T] Greet a", " Greet b", " Greet c"]


def test_a_job_without_a_chat_template(tmp_path: Path, model: Path) -> None:
    told = {"system": None, "chat": False, "user": "Q: {{ text }}\nA:"}
    path = write_job(tmp_path, model, people(3), prompt=told)
    assert prompts(path)[0] == "Q: person 0\nA:"
    run(path)
    text = write_job(
        tmp_path,
        model,
        [{"text": f"Q: person {n}\nA:"} for n in range(3)],
        prompt={"system": None, "user": None, "text": "text"},
    )
    assert run(text, NO_ENGINE)[0].row["reused_requests"] == 3
