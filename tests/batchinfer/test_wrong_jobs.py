"""Tests messages of `validate`, errors of single rows, and failed runs."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from batchinfer.input.prompts import render_worker
from batchinfer.pipeline.workers.engine_entry import ENGINE
from tests import warm_commands
from tests.batchinfer.test_refused_jobs import other_job, without_template
from tests.batchinfer.wrong_jobs import NO_ENGINE, ROWS, CliOf, Place, clear, environment
from tests.checkpoints import edit_json
from tests.examples import first_of
from tests.patience import PATIENCE_S


def from_file(name: str, more: str = "") -> str:
    return f"input: {{path: {json.dumps(name)}{more}}}"


RIGHT: dict[str, Callable[[Place], object]] = {
    "a column in a later row only": lambda p: (p.rows(*ROWS * 30, {"id": "last", "text": "x", "note": "y"}),
        p.job(output="output: {path: out/res, columns: [note]}")),
    "a template that does without": lambda p: p.job(
        prompt="prompt: {user: \"{% if text == 'odd' %}{{ more }}{% else %}{{ text }}{% endif %}\"}"
    ),
    "a query": lambda p: p.job(input="input: {sql: select text from 'rows.jsonl'}"),
    "a text prompt without a chat template": lambda p: (without_template(p), p.job(prompt="prompt: {text: text}")),
}  # fmt: skip


@pytest.mark.parametrize("name", first_of(RIGHT, 2))
def test_validate_and_run_agree_on_what_is_right(name: str, place: Place, cli_of: CliOf) -> None:
    RIGHT[name](place)
    command_line = cli_of()
    for verb in ("validate", "preview", "run"):
        ended = command_line(verb, place.folder / "job.yaml")
        assert ended.code == 0, (verb, ended.err)


def test_validate_reports_bad_rows_within_the_budget(place: Place, cli_of: CliOf) -> None:
    place.rows(*ROWS, b"{no")
    place.job("on_error: {max_error_rate: 0.1}")
    ended = cli_of()("validate", place.folder / "job.yaml")
    assert "1 of all 21 would become error rows" in ended.out
    assert "1 × bad_json, first rows.jsonl row 20" in ended.out


def test_validate_reads_the_first_rows_of_every_file(place: Place, cli_of: CliOf) -> None:
    """A long input is not read to its end: its error rate is unknown, and mistakes so far are reported."""
    place.rows(*ROWS * 50, name="in/a.jsonl")
    place.rows(b"{no", *ROWS, name="in/b.jsonl")
    place.job("on_error: {max_error_rate: 0}", input=from_file("in", ", id: id"))
    run = cli_of()
    checked = run("validate", place.folder / "job.yaml")
    assert checked.code == 0
    assert "1 of the first 512 of each file, 533 in all, would become error rows" in checked.out
    assert "in/b.jsonl row 0" in checked.out
    assert run("run", place.folder / "job.yaml").code == 65


@pytest.mark.slow
def test_a_column_that_looks_like_a_parameter_is_reported(place: Place, cli_of: CliOf) -> None:
    place.rows(*({**row, "temperature": 23.5, "seed": 1} for row in ROWS))
    place.job(output="output: {path: out/res, columns: [seed]}")
    run = cli_of()
    for verb in ("validate", "preview", "run"):
        ended = run(verb, place.folder / "job.yaml")
        assert "the input has the column temperature, but the job ignores it" in ended.out + ended.err


def test_an_empty_file_is_an_empty_result_if_the_job_allows_it(place: Place, cli_of: CliOf) -> None:
    place.rows()
    place.job(input=from_file("rows.jsonl", ", allow_empty: true"))
    ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml", "--json")
    assert (ended.code, json.loads(ended.out)["rows"]) == (0, 0)
    assert place.table() == []


def test_a_held_lock(place: Place, cli_of: CliOf) -> None:
    place.bytes(b"4711\n", "out/.batchinfer-res/lock")
    with (place.state / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 75
    assert "process 4711" in ended.err
    assert "try again" in ended.err
    clear(ended.err)


# Wrong options exit with 2 and point to the help.
USAGE = {
    "no such verb": (("walk",), "walk"),
    "no rows": (("run", "job.yaml", "--limit", "0"), "--limit"),
    "a dry run": (("run", "job.yaml", "--dry-run"), "`batchinfer plan JOB.YAML` says what a run would do"),
    "a setting without a value": (("run", "job.yaml", "--set", "engine"), "KEY=VALUE"),
    "SQL that DuckDB refuses": (("query", "out/res", "selec 1"), "selec"),
    "a job is there already": (("init", "."), "job.yaml: exists already"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage(name: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    place.rows()
    run = cli_of(NO_ENGINE)
    if name.startswith("SQL"):
        place.job(output="output: {path: out/res}")
        assert run("run", "job.yaml", "-q", "--set", "input.allow_empty=true").code == 0
    arguments, word = USAGE[name]
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert word in ended.err
    clear(ended.err)


def test_a_pipe_is_no_input(place: Place) -> None:
    """Runs in its own process: opening a pipe without a writer never returns."""
    os.mkfifo(place.folder / "pipe.jsonl")
    place.job(input=from_file("pipe.jsonl"))
    ended = warm_commands.run(
        [sys.executable, "-m", "batchinfer", "run", "job.yaml"],
        cwd=place.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (66, "")
    assert "pipe.jsonl: is not a regular file" in ended.stderr


# A mistake per row, for each stage that finds mistakes: (line, error code, error class)
TEMPLATE = (
    "{% if times is defined %}{{ text * times }}{% elif divisor is defined %}{{ 1 // divisor }}"
    "{% else %}{{ text }}{% endif %}"
)
OWN = ("max_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos")
BAD_ROWS: list[tuple[object, str, str]] = [
    (b'{"id": "a", "text": "\xff"}', "bad_utf8", "input"),
    (b'{"id": "c", "text": "open', "bad_json", "input"),
    (b'{"text": "' + b"x" * 70_000 + b'"}', "line_too_long", "input"),
    (b"null", "not_an_object", "input"),
    ({"id": "no-text"}, "template_error", "input"),
    ({"id": "null", "text": None}, "null_in_template", "input"),
    ({"text": {"a": 1}, "times": 2}, "template_error", "input"),
    ({"text": "fine", "divisor": 0}, "template_error", "input"),
    ({"text": "fine", "times": 2_000_000}, "text_too_long", "policy"),
    ({"text": "fine", "times": 10**11}, "template_memory", "resource"),
    ({"text": "x" * 600}, "prompt_too_long", "policy"),
    *(({"text": "fine", name: value}, "bad_parameter", "input") for name, value in {
        "max_tokens": 0, "temperature": "hot", "seed": 2**63, "stop_token_ids": [-1], "ignore_eos": "no"}.items()),
    ({"text": "fine", "stop": list("abcdefghijklmnopq")}, "too_many_stops", "input"),
    ({"id": "good", "text": "again"}, "duplicate_custom_id", "input"),
]  # fmt: skip


@pytest.mark.usefixtures("render_processes")
def test_each_bad_row_fails_alone(place: Place, cli_of: CliOf) -> None:
    """Good rows around it are answered."""
    rows: list[object] = [{"id": "good", "text": "fine"}]
    for number, (line, _, _) in enumerate(BAD_ROWS):
        rows += [line, {"id": f"good-{number}", "text": "fine"}]
    place.rows(*rows)
    place.job(
        "on_error: {max_error_rate: 1}",
        input="input: {path: rows.jsonl, id: id, unique_ids: true, max_line_bytes: 64KiB}",
        sampling=f"sampling: {{max_tokens: 8, from_columns: [{', '.join(OWN)}]}}",
        prompt=f"prompt: {{user: {json.dumps(TEMPLATE)}}}",
        output="output: {path: out/res}",
    )
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    table = place.table()
    assert [row["row_index"] for row in table] == list(range(len(rows)))
    assert all(row["status"] == "ok" and row["generated_text"] for row in table[::2])
    found = [(row["status"], row["error_code"], row["error_class"]) for row in table[1::2]]
    assert found == [("error", code, kind) for _, code, kind in BAD_ROWS]
    for row in table[1::2]:
        assert row["generated_text"] is row["finish_reason"] is row["completion_tokens"] is None
        assert 0 < len(row["error_message"].encode()) <= 2048
        assert row["retryable"] is False


def line(custom_id: str, text: str) -> bytes:
    return json.dumps({"id": custom_id, "text": text}, ensure_ascii=False).encode()


ACCEPTED = {
    "a-bom.jsonl": b"\xef\xbb\xbf" + line("bom", "x") + b"\n",
    "b-crlf.jsonl": line("crlf-1", "x") + b"\r\n" + line("crlf-2", "x") + b"\r\n",
    "c-no-newline.jsonl": line("n-1", "x") + b"\n" + line("n-2", "x"),
    "d-blank.jsonl": b"\n\n" + line("blank-1", "x") + b"\n \t\r\n" + line("blank-2", "x") + b"\n\n",
    "e-members.jsonl.gz": gzip.compress(line("m-1", "x") + b"\n") + gzip.compress(line("m-2", "x") + b"\n"),
    "f-empty.jsonl": b"",
    "g-text.jsonl": b"\n".join([
        line("nul", "a\0b"), line("../../etc/passwd", "x"), line("plain", "(im_end)!!"),
        line("special", "<|im_end|>"), b'{"id": "raw-nul", "text": "a\0b"}', line("emoji 😀", "😀"),
    ]),
}  # fmt: skip


def test_accepted(place: Place, cli_of: CliOf) -> None:
    for name, data in ACCEPTED.items():
        place.bytes(data, f"in/{name}")
    place.job("on_error: {max_error_rate: 0}", input=from_file("in", ", id: id"))
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    table = {row["custom_id"]: row for row in place.table()}
    assert list(table) == [
        "bom", "crlf-1", "crlf-2", "n-1", "n-2", "blank-1", "blank-2", "m-1", "m-2",
        "nul", "../../etc/passwd", "plain", "special", "raw-nul", "emoji 😀",
    ]  # fmt: skip
    assert table["blank-2"]["row_index"] == 1
    assert table["nul"]["text"] == table["raw-nul"]["text"] == "a\0b"
    assert table["nul"]["generated_text"] == table["raw-nul"]["generated_text"]
    # ten bytes and no control token
    assert table["special"]["prompt_tokens"] == table["plain"]["prompt_tokens"]
    assert {path.name for path in place.folder.iterdir()} == {"in", "job.yaml", "model", "out", "rows.jsonl"}


def test_another_jobs_result_is_replaced_when_asked_and_other_files_never(
    place: Place, cli_of: CliOf
) -> None:
    other_job(place)
    assert cli_of()("run", place.folder / "job.yaml", "--replace").code == 0
    assert len(place.table()) == len(ROWS)
    place.bytes(b"precious", "out/res/thesis.txt")
    assert cli_of(NO_ENGINE)("run", place.folder / "job.yaml", "--replace").code == 73


def test_the_input_changes_during_the_run(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_MEDDLES_WITH", str(place.folder / "rows.jsonl"))
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 65
    assert "rows.jsonl" in ended.err
    assert "changed" in ended.err
    assert place.published() == {}


def test_the_kv_cache_does_not_fit(place: Place, cli_of: CliOf) -> None:
    edit_json(place.own_model() / "config.json", max_position_embeddings=100_000)
    place.job("engine: {device: cpu, kv_memory: 1MiB}", sampling="sampling: {max_tokens: 50000}")
    ended = cli_of(ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 71
    assert "the KV cache of the longest row" in ended.err
    assert "engine.kv_memory" in ended.err
    assert "Traceback" not in ended.err
    assert place.published() == {}


@pytest.mark.slow
def test_the_disk_is_full(place: Place, cli_of: CliOf) -> None:
    """Simulated without a disk: no file may exceed 1 MiB. A chunk of rows needs less."""
    place.rows(*({"id": f"r{i}", "text": f"{i:099d}"} for i in range(4000)))
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}));"
        "import sys; sys.argv[1:] = ['run', 'job.yaml']; from tests.fake_cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=place.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 74, ended.stderr
    assert ".batchinfer-res" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert place.published() == {}
    assert cli_of()("run", place.folder / "job.yaml").code == 0
    assert len(place.table()) == 4000


@pytest.mark.slow
@pytest.mark.usefixtures("render_processes")
def test_a_template_that_never_ends(place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows in sequence reveal it, of 20 s each."""
    monkeypatch.setattr(render_worker, "_HANGS_IN_A_ROW", 2)
    loop = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk") + "{% endfor %}" * 3
    place.job(prompt=f"prompt: {{user: {json.dumps(loop + '{{ text }}')}}}")
    ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 78
    assert "prompt" in ended.err
    assert "loop for ever" in ended.err
