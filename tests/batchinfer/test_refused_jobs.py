"""Tests errors before an engine starts: wrong sections of a job, wrong files, and folders in use."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchinfer.machine.hardware import nvidia_gpus
from batchinfer.store.results.manifest import MANIFEST_NAME, Manifest
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, ROWS, CliOf, Place, clear
from tests.checkpoints import edit_json

PLAIN = {"prompt": "{text: text}", "sampling": None}
CHAT = {"sampling": None}
LISTS = {"output": "{path: out/res, explode: false}"}
SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NESTED = "[" * 100_000
TOOLS = [{"type": "function", "function": {"name": "now"}}]
EXPECTED = {"input": "{path: rows.jsonl, expected: text}"}
CALLED = {"user": "x", "tools": TOOLS, "chat_template": "tools.jinja"}
# Files of the job in addition to its input
FILES = {
    "deep.json": NESTED,
    "true.json": "true",
    "broken.jinja": "{% if x %}\n{% endfor %}",
    "silent.jinja": "{{ messages[0].content }}",
    "arguments.jinja": "{{ effort }}{{ enable_thinking }}{{ documents }}{{ messages[0].content }}",
    "tools.jinja": "{{ tools }}{{ messages[0].content }}",
}


def output(**more: Any) -> dict[str, str]:
    return {"output": json.dumps({"path": "out/res", **more})}


def prompt(**section: Any) -> dict[str, str]:
    return {"prompt": json.dumps({"user": "{{ text }}", **section})}


# Replaced sections (None removes one), and words of the message
CASES: list[tuple[dict[str, str | None], tuple[str, ...]]] = [
    (PLAIN | {"task": "classify"}, ("classify.choices: are missing",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a]}"}, ("classify.choices: has one label",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b, a]}"}, ('has "a" 2 times',)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b], choices_from_column: c}"},
        ("is given together with choices",)),
    (PLAIN | {"task": "classify", "classify": "{choices_from_column: text, calibrate: true}"},
        ("labels of their own",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b], calibrate: 3}"},
        ("must be true or false, or a text",)),
    (PLAIN | {"task": "score", "classify": "{choices: [a, b]}"}, ("but the job does not have task: classify",)),
    (PLAIN | {"task": "score", "sampling": "{max_tokens: 3}"}, ("sampling: says how tokens are chosen",)),
    (PLAIN | {"score": "{per_token: true}"}, (": its answers are texts",)),
    (PLAIN | {"task": "score", "score": "{continuation: nothing}"}, ("score.continuation",)),
    (CHAT | {"task": "rerank", "rerank": "{yes: no}"}, ('rerank.no: is "no", the same as yes',)),
    (CHAT | {"task": "rerank", "rerank": "{query: text}"}, ("rerank.query",)),
    (CHAT | {"rerank": "{yes: good}"}, (": its answers are texts",)),
    (CHAT | {"task": "rerank", "sampling": "{max_tokens: 3}"}, ("answers are scores of relevance",)),
    (CHAT | {"task": "rerank", "classify": "{choices: [a, b]}"}, ("but the job does not have task: classify",)),
    (CHAT | {"task": "rerank", "prompt": '{user: "{{ text }}", truncate: right}'}, ("and not the document",)),
    (LISTS, ("each row has one answer",)),
    (LISTS | {"sampling": "{temperature: 1, n: 2, from_columns: [n]}"}, ("n is read from a column",)),
    (LISTS | {"sampling": "{temperature: 1, n: 2}", "input": "{path: rows.jsonl, id: id, expected: text}"},
        ("input.expected is compared with single answers",)),
    ({"sampling": "{n: 3}"}, ("sampling.n: is 3, but temperature is 0",)),
    ({"sampling": "{n: 0, temperature: 1}"}, ("sampling.n",)),
    ({"sampling": "{best_of: 3}"}, ("sampling.best_of: is 3, but temperature is 0",)),
    ({"sampling": "{n: 4, best_of: 3, temperature: 1}"},
        ("sampling.best_of: is 3, fewer than sampling.n, which is 4",)),
    ({"sampling": "{n: 2000, temperature: 1}"}, ("sampling.n",)),
    ({"sampling": "{max_tokens: fit}"}, ("sampling.max_tokens", "no constraint that bounds the answers")),
    ({"sampling": "{max_tokens: fits}"}, ("sampling.max_tokens", "a whole number from 1 to 2,147,483,647, or fit")),
    ({"sampling": "{max_tokens: fit, json_object: true}"}, ("sampling.max_tokens", "any JSON object is allowed")),
    ({"sampling": "{max_tokens: fit}", **output(schema={"properties": {"a": {"type": "string"}}, "type": "object"})},
        ("sampling.max_tokens", "is fit, and answers have no bound: a: give maxLength")),
    ({"sampling": "{regex: a, choice: [b], from_columns: [grammar]}", **output(schema=SHAPE)},
        ("sampling.regex", "sampling.choice", "sampling.from_columns")),
    (output(schema=NESTED), ("output.schema",)),
    (output(schema_file="deep.json"), ("output.schema_file",)),
    # An OpenAI file may ask in any row for a column of log-probabilities
    (output(schema={"properties": {"LogProbs": {}}}), ("another column",)),
    (output(schema=SHAPE, column="logprobs"), ("another column",)),
    (output(schema={"properties": {"TEXT": {}}}, columns=["text"]), ("output.schema", "another column")),
    (output(schema={"type": "object"}), ("output.schema", "names no properties")),
    (output(schema={"properties": {"a": {"type": "foo"}}}), ("output.schema", "properties.a: 'foo' is no type")),
    (output(schema=3), ("output.schema", "a JSON Schema")),
    (output(schema=True), ("output.schema", "found true, which allows any JSON; write what answers look like")),
    (output(schema=False), ("output.schema", "found false, which no answer can follow")),
    (output(schema=[SHAPE]), ("output.schema", "for answers that are lists write {type: array")),
    (output(schema="[]"), ("output.schema", "found a list")),
    (output(schema="order.schema.json"), ("output.schema", "name its file in output.schema_file")),
    (output(schema_file="true.json"), ("output.schema_file", "true.json: found true")),
    (output(schema_file="none.json"), ("output.schema_file", "No such file")),
    (output(schema_file="rows.jsonl"), ("output.schema_file", "not a JSON file")),
    (output(schema={}, schema_file="true.json"), ("output.schema_file", "together with output.schema")),
    (output(column="answer"), ("output.column", "needs an output.schema")),
    ({"engine": "{device: cpu, kv_memory: 900000GiB}"}, ("engine.kv_memory", "is more than this machine has")),
    ({"model": "{path: model, max_model_len: 4096}"}, ("line 2", "model.max_model_len", "4096", "512")),
    ({"prompt": None}, ("prompt", "is missing")),
    ({"sampling": "{from_columns: {temperature: warmth}}"}, ("sampling.from_columns", "no column 'warmth'")),
    # The checkpoint names no reasoning
    ({"sampling": "{thinking_budget: 5}"}, ("names no tokens around reasoning; name them in prompt.reasoning",)),
    ({"sampling": "{from_columns: [thinking_budget]}"}, ("sampling.from_columns: thinking_budget",)),
    ({"on_invalid": "[{thinking_budget: 9}]"}, ("on_invalid: thinking_budget",)),
    (prompt(reasoning="never"), ('found the text "never"; it must be auto, none, or',)),
    (prompt(reasoning={"begin": "<a>"}), ("a mapping with begin; it must have the two keys",)),
    (prompt(reasoning={"begin": "a", "end": "a"}), ("give two different texts",)),
    (prompt(reasoning={"begin": "", "end": "a"}), ("prompt.reasoning",)),
    # Arguments of the chat template
    (prompt(chat_template="arguments.jinja", template_arguments={"enable_thinkin": True, "tools": []}),
        ("prompt.template_arguments.enable_thinkin", "arguments.jinja does not read the argument 'enable_thinkin'",
        "it reads documents, effort, enable_thinking", "did you mean enable_thinking?",
        "'tools' is a name that every chat template has already")),
    (prompt(chat_template="arguments.jinja", template_arguments_from_columns=["text"]),
        ("prompt.template_arguments_from_columns", "does not read the argument 'text'")),
    (prompt(chat_template="arguments.jinja", template_arguments_from_columns={"effort": "efort"}),
        ("prompt.template_arguments_from_columns", "no column 'efort'")),
    (prompt(chat_template="arguments.jinja", template_arguments={"documents": "x"}),
        ("template_arguments.documents", "must be a list of objects")),
    (prompt(chat_template="silent.jinja", template_arguments={"a": 1}), ("does not read", "it reads none")),
    (prompt(chat_template="broken.jinja"), ("prompt.chat_template", "broken.jinja: line 2 of the chat template")),
    # Tools, and calls of tools
    (prompt(tools=[{"type": "function", "function": {"name": ""}}]), ("prompt.tools", "[0].function.name must be")),
    (prompt(tools={"a": 1}), ("prompt.tools", "must be a list of tools")),
    (prompt(tools=TOOLS, chat=False), ("prompt.tools", "uses no chat template")),
    (prompt(tools=TOOLS, chat_template="silent.jinja"), ("prompt.tools", "silent.jinja reads no tools")),
    (prompt(tools_from_column="text", chat_template="silent.jinja"), ("prompt.tools_from_column", "no tools")),
    (prompt(tools_from_column="can", chat_template="tools.jinja"), ("tools_from_column", "no column 'can'")),
    (prompt(tool_choice="required"), ("prompt.tool_choice", "there are no tools")),
    (prompt(**CALLED, tool_choice="never"), ("prompt.tool_choice", "names no tool of prompt.tools: now")),
    ({"prompt": "{text: text, tool_choice: required}"}, ("prompt.tool_choice", "takes the prompt as it is")),
    (prompt(**CALLED, tool_choice="now", tool_calls="none"), ("prompt.tool_choice", "nothing shows how")),
    (prompt(**CALLED, tool_choice="now", tool_calls="hermes") | {"sampling": "{regex: a+}"},
        ("prompt.tool_choice", "only one constraint, and the job has regex")),
    (prompt(**CALLED, tool_calls="harmony"), ("prompt.tool_calls", "lacks the tokens of this style")),
    (prompt(**CALLED, tool_calls="hermes") | output(columns=["tool_calls"]), ("set prompt.tool_calls to none",)),
    (prompt(**CALLED, tool_calls="hermes") | output(schema={"properties": {"tool_calls": {}}}),
        ("set prompt.tool_calls to none",)),
    # Right answers
    ({"input": "{path: rows.jsonl, expected: Status}"}, ("input.expected",)),
    (EXPECTED | {"output": "{path: out/res, columns: [Text]}"}, ("differ only in case",)),
    ({"ray": "{address: auto, classes: any}"} | output(columns=["engine_class"]),
        ("a column that the result of a job with ray.classes: any has",)),
    ({"input": "{path: rows.jsonl, expected: txet}"}, ("did you mean 'text'",)),
    (EXPECTED | {"task": "embed"}, ("answers are vectors",)),
    ({"input": "{path: rows.jsonl, format: openai, expected: text}", "prompt": None}, ("OpenAI batch files",)),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "words"), CASES)
def test_wrong_sections_are_refused(
    sections: dict[str, str | None], words: tuple[str, ...], place: Place, cli_of: CliOf
) -> None:
    for name, text in FILES.items():
        (place.folder / name).write_text(text)
    given = {name: "" if one is None else f"{name}: {one}" for name, one in sections.items()}
    told = cli_of(NO_ENGINE)("run", place.job(**given))
    assert (told.code, [word for word in words if word not in told.err]) == (78, []), told.err
    assert not place.results.exists()


@dataclass(frozen=True)
class Wrong:
    """A mistake: the exit code, the words of its message, and a function that makes it.

    `run` and `validate` report it equally. So does `preview`, which is tested for one mistake per kind.
    """

    code: int
    words: tuple[str, ...]
    arrange: Callable[[Place], object]
    previewed: bool = False
    engine: str = NO_ENGINE  # or an engine that loads, if the mistake is found only after all rows are read


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def chat_template(p: Place, text: str) -> None:
    (p.own_model() / "chat_template.jinja").write_text(text)


def template_in_config(p: Place) -> None:
    edit_json(p.own_model() / "tokenizer_config.json", chat_template="a\n{{ messages[ }}")
    (p.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)


def without_template(p: Place) -> None:
    edit_json(p.own_model() / "tokenizer_config.json", chat_template=...)
    (p.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)


def reading(p: Place, name: str) -> None:
    p.job(input=f"input: {{path: {json.dumps(name)}}}")


def huge(p: Place) -> None:
    with (p.folder / "rows.jsonl").open("r+b") as file:
        file.truncate(1 << 42)  # of holes


def other_job(p: Place) -> None:
    manifest = Manifest("weekly", "x", (), 1, "0" * 16, 0, 0, 0, 0, (), ())
    p.bytes(json.dumps(manifest.to_json()).encode(), f"out/res/{MANIFEST_NAME}")


def linked(p: Place, name: str, to: str = "") -> None:
    """Create a link to a folder."""
    path = p.folder / name
    path.parent.mkdir()
    path.symlink_to(p.folder / to)


REFUSED = {
    "no job file": Wrong(66, ("no job file", "job.yaml"), lambda p: (p.folder / "job.yaml").unlink(), previewed=True),
    "several mistakes": Wrong(78, ("3 mistakes", "line 1: name", "line 3", "formt", "line 5", "sampling.max_tokens",
        "-1"), lambda p: p.job(name="name: [a]", input="input: {path: rows.jsonl, formt: x}",
        sampling="sampling: {max_tokens: -1}")),
    "no GPU": Wrong(69, ("engine.device", "device: cpu"), lambda p: p.job("engine: {device: cuda}")),
    "bits that ranks cannot promise": Wrong(69, ("engine.deterministic", "tensor_parallel_size"),
        lambda p: p.job("engine: {device: cpu, tensor_parallel_size: 2, deterministic: true}")),
    # The checkpoint
    "missing model folder": Wrong(78, ("line 2", "model.path", "nowhere"),
        lambda p: p.job(model="model: {path: nowhere}")),
    "unsupported architecture": Wrong(78, ("config.json", "model_type 'rwkv'", "llama, mistral, qwen2, qwen3"),
        lambda p: edit_json(p.own_model() / "config.json", architectures=["RwkvForCausalLM"], model_type="rwkv")),
    "code of the checkpoint": Wrong(77, ("config.json", "auto_map"), lambda p: edit_json(p.own_model()
        / "config.json", auto_map={"AutoModel": "code.Model"}, architectures=["OwnModel"]), previewed=True),
    "config.json is a pipe": Wrong(77, ("config.json", "not a regular file", "copy"),
        lambda p: pipe(p.own_model() / "config.json")),
    "weights of another shape": Wrong(78, ("wrong shape", "model.layers.0.mlp.gate_proj.weight", "[64, 48]",
        "[96, 48]"), lambda p: edit_json(p.own_model() / "config.json", intermediate_size=96)),
    "damaged tokenizer": Wrong(78, ("model.path", "tokenizer.json cannot be read as a tokenizer"),
        lambda p: truncate(p.own_model() / "tokenizer.json"), previewed=True),
    "a tokenizer that cannot be converted": Wrong(78, ("model.path", "cannot be converted"),
        lambda p: (p.own_model() / "tokenizer.json").rename(p.folder / "model" / "vocab.json")),
    "tokenizer_config.json not JSON": Wrong(78, ("tokenizer_config.json", "not valid JSON"),
        lambda p: truncate(p.own_model() / "tokenizer_config.json")),
    "chat template with a syntax error": Wrong(78, ("model", "chat_template.jinja", "line 3", "unknown tag 'els'",
        "prompt.text"), lambda p: chat_template(p, "{% if a %}\nx\n{% els %}\n{% endif %}"), previewed=True),
    "chat template of tokenizer_config.json with a syntax error": Wrong(78,
        ("tokenizer_config.json (chat_template)", "line 2", "prompt.text"), template_in_config),
    "chat template that nests too deeply": Wrong(78, ("chat_template.jinja", "line 200", "nests too deeply",
        "prompt.text"), lambda p: chat_template(p, "{% if messages %}\n" * 200 + "x" + "{% endif %}\n" * 200)),
    "chat template of long sums": Wrong(78, ("chat_template.jinja", "line 2", "nests too deeply"),
        lambda p: chat_template(p, "\n{{ " + "+".join("a" * 5000) + " }}")),
    "chat template that breaks out of no loop": Wrong(78, ("chat_template.jinja", "cannot be compiled",
        "'break' outside loop"), lambda p: chat_template(p, "{% break %}")),
    "chat template not UTF-8": Wrong(78, ("model.path", "chat_template.jinja: the byte at 0 is not UTF-8"),
        lambda p: (p.own_model() / "chat_template.jinja").write_bytes(b"\xff\xfe")),
    "no chat template": Wrong(78, ("line 4", "prompt.user", "no chat template", "prompt.text"), without_template),
    # The input
    "truncated gzip": Wrong(65, ("rows.jsonl.gz", "damaged gzip", "decompressed bytes", "truncated"), lambda p: (
        p.bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-12], "rows.jsonl.gz"), reading(p, "rows.jsonl.gz"))),
    "no space": Wrong(74, ("of disk", "are free", "make room"), huge),
    "missing file": Wrong(66, ("job.yaml: line 3: input.path", "Row.jsonl", "no such file", "did you mean",
        "rows.jsonl?"), lambda p: reading(p, "Row.jsonl"), previewed=True),
    "empty glob": Wrong(66, ("line 3: input.path", "dta/*.jsonl", "matches no file", "did you mean data?"),
        lambda p: ((p.folder / "data").mkdir(), reading(p, "dta/*.jsonl"))),
    "empty folder": Wrong(66, ("data", "no input file", ".jsonl"),
        lambda p: ((p.folder / "data").mkdir(), reading(p, "data"))),
    "no rows": Wrong(66, ("job.yaml: line 3: input.path", "the input has no rows", "input.allow_empty: true"),
        lambda p: p.rows(), previewed=True),
    "failing query": Wrong(78, ("line 3", "input.sql", "nothing_here"),
        lambda p: p.job(input="input: {sql: select * from nothing_here}"), previewed=True),
    "columns in no row": Wrong(78, ("2 mistakes", "line 3", "input.id", "no column 'ident'", "line 4", "prompt",
        "no column 'txet'", "did you mean 'text'?"), lambda p: p.job(input="input: {path: rows.jsonl, id: ident}",
        prompt='prompt: {user: "{{ txet }}"}')),
    "a column that a query lacks": Wrong(78, ("line 4", "prompt", "no column 'text'", "words"),
        lambda p: p.job(input="input: {sql: select 'x' as words}")),
    "too many bad rows": Wrong(65, ("5 of 20 rows are errors", "on_error.max_error_rate", "1.00%", "5 × bad_json",
        "rows.jsonl row 15"), lambda p: p.rows(*ROWS[:15], *[b"{not json"] * 5), engine=FAKE),
    # The places of the result, the report, the state and the stored answers
    "strangers' files": Wrong(73, ("out/res", "'thesis.txt'", "move them away"),
        lambda p: p.bytes(b"precious", "out/res/thesis.txt"), previewed=True),
    "a file": Wrong(73, ("out/res", "is a file", "folder"), lambda p: p.bytes(b"x", "out/res")),
    "a link that leads nowhere yet": Wrong(73, ("output.path:", "elsewhere"),
        lambda p: linked(p, "out/res", "elsewhere")),
    "result of another job": Wrong(73, ("out/res", "'weekly'", "'nightly'", "--replace"), other_job),
    "unreadable manifest": Wrong(73, (MANIFEST_NAME, "move the folder away"),
        lambda p: p.bytes(b"\x00", f"out/res/{MANIFEST_NAME}")),
    "a file on the way": Wrong(73, ("out: is a file", "output.path"), lambda p: p.bytes(b"x", "out")),
    "a linked report": Wrong(73, ("res-report: is a symbolic link", "remove the link"),
        lambda p: linked(p, "out/res-report")),
    "a report in a file": Wrong(73, ("res-report: is a file", "move the file away"),
        lambda p: p.bytes(b"x", "out/res-report")),
    "a linked state": Wrong(73, (".batchinfer-res: is a symbolic link", "remove the link"),
        lambda p: linked(p, "out/.batchinfer-res")),
    "a store in a file": Wrong(74, ("cache: is a file",), lambda p: (p.bytes(b"x", "cache"),
        p.job("cache: {path: cache}"))),
}  # fmt: skip
# Found by processes that import transformers; tests of models and tokenizers cover them, too
IN_PROCESSES = ("a tokenizer that cannot be converted", "unsupported architecture")
FREE = re.compile(r"[\d.]+ GiB are free")  # other processes use the disk, too


HERE = [name for name in REFUSED if name != "no GPU" or not nvidia_gpus()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_PROCESSES)) for name in HERE]
)
def test_run_validate_and_preview_reject_equally(
    name: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`validate` writes nothing, and the published result stays."""
    case, command_line = REFUSED[name], cli_of(REFUSED[name].engine)
    monkeypatch.chdir(place.folder)
    case.arrange(place)
    before, published = set(place.folder.rglob("*")), place.published()
    checked = command_line("validate", "job.yaml")
    assert set(place.folder.rglob("*")) == before
    told = [checked, *(command_line(verb, "job.yaml") for verb in ("preview", "run")[not case.previewed :])]
    assert place.published() == published
    for ended in told:
        assert (ended.code, ended.out) == (case.code, ""), ended.err
        assert [word for word in case.words if word not in ended.err] == [], ended.err
        clear(ended.err)
    # `run` may also say how to see the rows that it has stored
    assert FREE.sub("", checked.err) in FREE.sub("", told[-1].err)
