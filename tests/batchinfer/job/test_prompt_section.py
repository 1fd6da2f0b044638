"""The prompt section: template arguments, other templates, no template, invalid combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.job import Job
from tests.batchinfer.job.test_job import MINIMAL, load

OPENAI = MINIMAL.replace('prompt: {user: "{{ q }}"}\n', "").replace("input: {", "input: {format: openai, ")


def prompt(folder: Path, text: str) -> Job:
    return load(folder, MINIMAL.replace('{user: "{{ q }}"}', text))


def test_arguments_are_values_of_all_kinds(tmp_path: Path) -> None:
    job = prompt(
        tmp_path,
        '{user: "{{ q }}", template_arguments: {enable_thinking: false, effort: low, n: 1, x: 1.5, gone: null, '
        "documents: [{title: a, text: null}]}, template_arguments_from_columns: {effort: e}}",
    )
    assert job.prompt is not None
    documents = [{"title": "a", "text": None}]
    assert job.prompt.arguments == {
        "enable_thinking": False, "effort": "low", "n": 1, "x": 1.5, "documents": documents,
    }  # fmt: skip
    assert job.prompt.template_arguments_from_columns == (("effort", "e"),)
    assert '{"effort": "e"}' in job.describe()
    assert "enable_thinking" in job.describe()


def test_one_argument_by_set_and_one_taken_out(tmp_path: Path) -> None:
    settings = (("prompt.template_arguments", "{a: 1, b: 2}"), ("prompt.template_arguments.a", "null"))
    job = load(tmp_path, MINIMAL, *settings)
    assert job.prompt is not None
    assert job.prompt.arguments == {"b": 2}
    plain = load(tmp_path, MINIMAL, ("prompt.template_arguments", "{}"))
    assert plain.identity_json() == load(tmp_path).identity_json() != job.identity_json()


def test_the_text_of_a_template_file_is_kept_and_its_place_is_no_part_of_the_identity(tmp_path: Path) -> None:
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text("{{ messages }}")
    first, second = (
        load(tmp_path, MINIMAL, ("prompt.chat_template", name)) for name in ("a.jinja", "b.jinja")
    )
    (tmp_path / "a.jinja").write_text("changed")
    assert first.chat_template == second.first_rows(3).chat_template == "{{ messages }}"
    assert first.identity_json() == second.identity_json() == load(tmp_path).identity_json()


def test_openai_files_may_have_a_section_without_prompts(tmp_path: Path) -> None:
    said = "prompt: {template_arguments: {a: 1}, truncate: left}\n"
    job = load(tmp_path, OPENAI + said)
    assert job.requests
    assert load(tmp_path, OPENAI).requests
    assert not load(tmp_path).requests
    assert "as OpenAI's API does" in job.describe()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{user: "x", template_arguments: [a]}', ("template_arguments", "found a list", "a mapping from arguments")),
        ('{user: "x", template_arguments: "no"}', ("template_arguments", "found the text", "a mapping")),
        ('{user: "x", template_arguments: {a: .inf}}', ("template_arguments", "a has a number that is not finite")),
        ('{user: "x", template_arguments_from_columns: {a: 3}}', ("found the number 3 for a", "name of a column")),
        ('{user: "x", template_arguments_from_columns: [a, a]}', ("names a twice",)),
        ('{user: "x", template_arguments_from_columns: [""]}', ("must be the name of",)),
        ('{user: "x", chat_template: gone.jinja}', ("line 4", "prompt.chat_template", "cannot be read: No such file")),
        ('{user: "x", chat_template: .}', ("prompt.chat_template", "no regular file")),
        ('{user: "x", chat_template: latin.jinja}', ("prompt.chat_template", "byte at 1 is not UTF-8")),
        ('{user: "x", chat_template: empty.jinja}', ("prompt.chat_template", "is empty")),
        ('{user: "x", chat_template: long.jinja}', ("prompt.chat_template", "over 4,194,304 bytes")),
        ("{text: q, chat: false}", ("prompt.chat", "text takes the prompt as it is", "remove it")),
        ("{text: q, chat_template: x.jinja}", ("prompt.chat_template", "text takes the prompt as it is")),
        ("{token_ids: q, template_arguments: {a: 1}}", ("prompt.template_arguments", "token_ids takes")),
        ("{messages: q, chat: false}", ("prompt.chat", "only a chat template makes a prompt of messages")),
        ('{user: "x", chat: false, system: "y"}', ("prompt.system", "put its text at the beginning of user")),
        ('{user: "x", chat: false, chat_template: x.jinja}', ("prompt.chat_template", "uses no chat template")),
        ('{user: "x", chat: false, template_arguments: {a: 1}}', ("template_arguments", "uses no chat template")),
        ("{template_arguments: {a: 1}}", ("has none of user, messages, text and token_ids",)),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_section(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "x.jinja").write_text("{{ messages }}")
    (tmp_path / "latin.jinja").write_bytes(b"a\xe4")
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "long.jinja").write_text("x" * (4 << 20) + "x")
    with pytest.raises(JobFileError) as found:
        prompt(tmp_path, text)
    assert all(word in str(found.value) for word in words), str(found.value)
    assert len(found.value.mistakes) == 1


@pytest.mark.parametrize("text", ["{template_arguments_from_columns: [a]}", '{system: "x"}', "{chat: false}"])
def test_options_that_requests_set_are_refused_in_the_job(tmp_path: Path, text: str) -> None:
    with pytest.raises(JobFileError, match=r"is not for OpenAI batch files: each request says what it asks"):
        load(tmp_path, f"{OPENAI}prompt: {text}\n")
