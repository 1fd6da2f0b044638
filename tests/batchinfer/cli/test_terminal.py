"""Output to a terminal, a pipe or a closed stream: escapes, colours, JSON, completion, closed windows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer import cli
from batchinfer.core.errors import BatchInferError
from batchinfer.core.text import json_line, printable, with_near_paths
from batchinfer.machine.hardware import Hardware
from batchinfer.report.tables.exit_status import MEANINGS
from batchinfer.verbs import starter
from tests import warm_commands
from tests.batchinfer.cli.screen import lines_on, on_terminal
from tests.batchinfer.cli.test_cli import MANY, SLOW, committed, kinds, long_job, runs
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Place, alive, children, environment
from tests.examples import examples
from tests.patience import PATIENCE_S, wait_until
from tests.reference import VERBS

ROOT = Path(__file__).parents[3]
EVIL = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp\x7f\r\x08"
SHELL = {"TERM": "xterm-256color", "NO_COLOR": ""}


def harmless(text: str) -> None:
    """Check that the text has no control characters."""
    found = re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert found == []


# --- text that others wrote


@settings(max_examples=examples(10, 100))
@given(st.text() | st.text("\x00\x1b\x7f\x9b\u2028\u202e\ud800\n\tä"))
def test_printable_text_is_harmless_and_can_be_written(text: str) -> None:
    shown = printable(text)
    harmless(shown)
    shown.encode()
    assert printable(shown) == shown
    line = json_line({"text": text})
    harmless(line)
    assert "\n" not in line
    assert json.loads(line)["text"] == text


def test_what_is_harmless_stays() -> None:
    assert printable("Grüße\t😀 日本\nعربي") == "Grüße\t😀 日本\nعربي"
    assert printable("\x1b[1m\u202e") == "\\x1b[1m\\u202e"


def test_paths_below_the_current_folder_become_relative(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    here = tmp_path / "a folder"
    here.mkdir()
    monkeypatch.chdir(here)
    beside = f"{here} {here}s/x {tmp_path}/x /mnt{here}/x {here}/"
    assert with_near_paths(beside) == beside
    text = f"{here}/job.yaml: 1 mistake, '{here}/x y', (path={here}/z) \x1b[1m{here}/bold"
    assert with_near_paths(text) == "job.yaml: 1 mistake, 'x y', (path=z) \x1b[1mbold"
    command = f"batchinfer run {here}/job.yaml --set output.path={here}/out --set 'input.path={here}/a b'"
    assert with_near_paths(command) == command.replace(
        f"{here}/job.yaml", "job.yaml"
    )  # relative to the job file
    here.rmdir()
    assert with_near_paths(text) == text


def test_preview_shows_control_characters_escaped(place: Place, cli_of: CliOf) -> None:
    place.rows({"id": EVIL, "text": EVIL})
    run = cli_of(NO_ENGINE)
    ended = run("preview", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    harmless(ended.out)
    assert "\\x1b[2J\\x1b]0;owned\\x07" in ended.out
    (line,) = run("preview", place.folder / "job.yaml", "--json").out.splitlines()
    harmless(line)
    assert EVIL in json.loads(line)["text"]


@pytest.mark.parametrize(("verb", "sections"), [
    ("validate", {"name": f"name: {json.dumps('x' + EVIL)}"}),
    ("validate", {"sampling": f"sampling: {{{json.dumps(EVIL)}: 1}}"}),
    ("validate", {"input": f"input: {{path: {json.dumps(EVIL + '.jsonl')}}}"}),
    ("run", {"prompt": f"prompt: {{text: {json.dumps('no' + EVIL)}}}"}),
])  # fmt: skip
def test_messages_show_control_characters_escaped(
    verb: str, sections: dict[str, str], place: Place, cli_of: CliOf
) -> None:
    place.job(**sections)
    ended = cli_of(NO_ENGINE)(verb, place.folder / "job.yaml")
    print(ended)
    harmless(ended.out + ended.err)


# --- JSON of every verb that prints


def only_line(text: str) -> dict[str, Any]:
    (line,) = text.splitlines()
    return dict(json.loads(line))


def test_every_verb_that_prints_has_json(place: Place, tmp_path: Path, cli_of: CliOf) -> None:
    run = cli_of()
    job = place.folder / "job.yaml"
    place.rows({"id": "a", "text": "one"}, {"id": "b"}, name="two.jsonl")

    told = only_line(run("validate", job, "--json").out)
    assert (told["exit_code"], told["options"]["sampling"]["max_tokens"]) == (0, 8)
    assert any("llama" in line for line in told["found"])

    good, bad = run("preview", job, "--json", "--set", "input.path=two.jsonl").out.splitlines()
    good, bad = json.loads(good), json.loads(bad)
    assert set(good) == {
        "file", "row_index", "id", "text", "token_ids", "continuations", "sampling", "own_sampling", "error"
    }  # fmt: skip
    assert (good["id"], good["error"], good["sampling"]["max_tokens"]) == ("a", None, 8)
    assert "Say one" in good["text"]
    assert (bad["row_index"], bad["text"], bad["error"]["code"]) == (1, None, "template_error")

    assert only_line(run("run", job, "--json").out)["exit_status"] == "published"
    assert only_line(run("verify", place.results, "--json").out) == {
        "exit_code": 0, "path": str(place.results), "problems": [], "store": str(place.state / "completions"),
    }  # fmt: skip
    next(place.results.glob("*.parquet")).write_bytes(b"x")
    broken = run("verify", place.results, "--json")
    told = only_line(broken.out)
    assert (broken.code, told["exit_code"]) == (74, 74)
    assert [set(problem) for problem in told["problems"]] == [{"path", "message"}] * 2

    assert "torch" in only_line(run("doctor", "--json").out)
    told = only_line(run("init", tmp_path / "new", "--json").out)
    assert told["wrote"][0] == str(tmp_path / "new" / "job.yaml")
    # these print JSON without the option, or only messages on stderr
    for verb in set(VERBS) - {"schema", "schema infer", "bench", "query", "worker"}:
        assert "--json" in {option for parameter in VERBS[verb].params for option in parameter.opts}


def test_json_lists_the_mistakes_of_a_job_file(place: Place, cli_of: CliOf) -> None:
    place.job(sampling="sampling: {max_tokns: 8}")
    ended = cli_of(NO_ENGINE)("validate", place.folder / "job.yaml", "--json")
    told = only_line(ended.out)
    assert (ended.code, told["exit_code"], told["exit_status"]) == (78, 78, "wrong job")
    (mistake,) = told["mistakes"]
    assert (mistake["where"], mistake["line"]) == ("sampling.max_tokns", 5)


# --- how runs end, in words


def test_each_error_has_a_word_for_how_a_run_ended() -> None:
    assert {kind.status for kind in kinds(BatchInferError)} <= set(MEANINGS)


def test_a_result_stays_published_when_a_later_run_is_over_budget(place: Place, cli_of: CliOf) -> None:
    place.rows({"id": "a", "text": "one"}, b"{not json")
    run = cli_of()
    first = run("run", place.folder / "job.yaml", "--set", "on_error.publish=true")
    again = run("run", place.folder / "job.yaml")
    allowed = run("run", place.folder / "job.yaml", "--set", "on_error.max_error_rate=0.5")
    assert (allowed.code, "already published" in allowed.out) == (0, True)
    for ended, words in ((first, "published over budget"), (again, "already published over budget")):
        print(ended.out, ended.err)
        assert ended.code == 65
        assert ended.out.startswith(f"nightly: {words} (exit code 65)")
        assert "out/res/*.parquet" in ended.out
        assert "not published" not in ended.out + ended.err
        assert f"the results are {words.removesuffix(' over budget')}, but 1 of 2 rows" in ended.err
    # the second run changed nothing, and leaves no row
    assert [row["exit_status"] for row in runs(place)] == ["published over budget"]
    place.job("output: {path: out/other}", output="")
    assert run("run", place.folder / "job.yaml").code == 65
    (table,) = (place.folder / "out" / "other-report").glob("run-*.parquet")
    assert pq.read_table(table).column("exit_status").to_pylist() == ["over budget"]


@pytest.mark.slow
def test_the_forecast_is_the_same_before_and_after(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Hardware("a machine", "cpu", 2, 8 << 30, {"float32": 1e10, "bfloat16": 1e10}, 1e10, "measured")
    monkeypatch.setattr("batchinfer.machine.facts.detect", lambda device, gpu=None: known)
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    (before,) = re.findall(r"forecast: (\S+ \S+)(?: \(upper bound: [^)]*\))?, \d+ steps", ended.err)
    (after,) = re.findall(r"(?m)^  forecast engine (\S+ \S+), took", ended.out)
    assert before == after


# --- pipes and closed streams


def test_a_run_with_a_closed_stdout_reports_that_it_published(place: Place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread:
        done = warm_commands.run(
            [sys.executable, "-m", "tests.fake_cli", "run", "job.yaml"], timeout=PATIENCE_S,
            cwd=place.folder, env=environment(), stdout=unread, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert len(place.table()) == 20
    assert done.returncode == 0
    assert done.stderr.endswith("published; stdout is closed, so the summary is not printed\n"), done.stderr


def test_a_full_disk_under_stdout_is_reported_with_the_outcome(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cli_of()
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        ended = run("run", place.folder / "job.yaml")
    assert ended.code == 74
    assert re.search(r"out/res: published; stdout cannot be written: .*No space left", ended.err)
    assert len(place.table()) == 20


def test_a_command_whose_streams_are_none(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter sets closed streams to None."""
    run = cli_of()
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, None)
        codes = [
            cli._guarded(words) for words in (["run", str(place.folder / "job.yaml"), "--json"], ["nonsense"])
        ]
    assert codes == [0, 2]
    assert len(place.table()) == 20
    assert run("status", place.folder).code == 0


def test_the_entry_point_needs_no_stream() -> None:
    script = '"$0" -m batchinfer --version <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable], check=False).returncode == 0


# --- signals of a terminal


def test_a_run_whose_terminal_closes_still_writes_its_summary(place: Place) -> None:
    long_job(place)
    env = environment(**SLOW, **SHELL)
    with on_terminal(["tests.fake_cli", "run", "job.yaml"], place.folder, env, read=False) as terminal:
        wait_until(lambda: committed(place) >= 8)
        below = list(children(terminal.process.pid))
        terminal.close()
        assert terminal.wait(PATIENCE_S) == 128 + signal.SIGHUP
    wait_until(lambda: not alive(below))  # multiprocessing's tracker leaves a moment after its parent
    (row,) = runs(place)
    assert (row["exit_code"], row["exit_status"]) == (129, "interrupted")
    assert row["computed_requests"] == committed(place) < len(MANY)


def test_ctrl_c_on_a_terminal_does_not_mix_the_bar_with_messages(place: Place) -> None:
    long_job(place)
    env = environment(**SLOW, **SHELL)
    with on_terminal(["tests.fake_cli", "run", "job.yaml"], place.folder, env) as terminal:
        wait_until(lambda: committed(place) >= 8)
        terminal.type(b"\x03")
        assert terminal.wait(PATIENCE_S) == 130
    shown = lines_on(terminal.text)
    print("\n".join(shown))
    (stopping,) = [n for n, line in enumerate(shown) if "stopping: rows being computed have" in line]
    assert shown[stopping].startswith("stopping: ")
    assert re.fullmatch(r"running +\d+%\|.*\| [\d.]+k? of [\d.]+k? tokens.*", shown[stopping + 1])
    assert shown[stopping + 2].startswith("batchinfer: interrupted; ")
    assert len(shown) == stopping + 3
    assert "\x1b[31m" in terminal.text  # the error's colour


# --- colours


@pytest.mark.parametrize(("arguments", "env", "coloured"), [
    ([], {}, True),
    ([], {"NO_COLOR": "1"}, False),
    ([], {"TERM": "dumb"}, False),
    (["--no-color"], {}, False),
])  # fmt: skip
def test_colours_on_a_terminal(
    arguments: list[str], env: dict[str, str], coloured: bool, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cli_of(NO_ENGINE)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name, value in (SHELL | env).items():
        monkeypatch.setenv(name, value)
    ended = run(*arguments, "validate", "gone.yaml")
    assert (ended.code, "\x1b[31m" in ended.err) == (66, coloured)
    assert "there is no job file gone.yaml" in ended.err


def test_no_colours_in_a_pipe(place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    run = cli_of(NO_ENGINE)
    for arguments in (["doctor"], ["validate", place.folder / "job.yaml"], ["validate", "gone.yaml"]):
        ended = run(*arguments)
        assert "\x1b" not in ended.out + ended.err


# --- the bare command, completion


def test_the_bare_command_shows_its_help_and_no_error(cli_of: CliOf) -> None:
    ended = cli_of(NO_ENGINE)()
    assert (ended.code, ended.err) == (2, "")
    assert "Usage: " in ended.out
    assert "validate" in ended.out


@pytest.mark.slow
def test_a_shell_can_complete_verbs_and_options(place: Place) -> None:
    def completed(words: str) -> list[str]:
        env = environment(
            _BATCHINFER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
        )
        code = "import sys; sys.argv = ['batchinfer']; from batchinfer.__main__ import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert completed("batchinfer va") == ["validate"]
    assert completed("batchinfer run --retr") == ["--retry-errors"]


# --- init


def test_init_without_a_model_brings_one_that_runs(tmp_path: Path, cli_of: CliOf) -> None:
    from batchinfer.pipeline.workers.engine_entry import ENGINE

    run = cli_of(ENGINE)
    ended = run("init", tmp_path / "new")
    assert ended.code == 0, ended.err
    job = tmp_path / "new" / "job.yaml"
    told = run("run", job, "--json", "--set", "engine.device=cpu")
    assert told.code == 0, told.err
    row = json.loads(told.out)
    assert (row["rows_ok"], row["duplicate_rows"]) == (4, 1)
    table = pq.read_table(tmp_path / "new" / "results").to_pylist()
    print(table)
    assert json.loads(table[1]["generated_text"]) == {
        "customer": "Petra Moreau", "quantity": 26, "item": "teddy bears", "due": "2027-03-14",
    }  # fmt: skip


def test_init_explains_the_next_steps(tmp_path: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "_SHIPPED", ())
    run = cli_of(NO_ENGINE)
    ended = run("init", tmp_path / "new")
    assert ended.code == 0
    assert f"first put a checkpoint into {tmp_path / 'new' / 'model'}: config.json" in ended.out
    assert f"--local-dir {tmp_path / 'new' / 'model'}" in ended.out
    assert json.loads(run("init", tmp_path / "newer", "--json").out)["ready"] is False


def test_init_uses_the_model_in_the_folder(tmp_path: Path, model: Path, cli_of: CliOf) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model").symlink_to(model)
    ended = cli_of(NO_ENGINE)("init", tmp_path / "new")
    assert ended.code == 0, ended.err
    assert sorted(os.listdir(tmp_path / "new")) == ["job.yaml", "model", "prompts.jsonl"]
    assert "question" in (tmp_path / "new" / "job.yaml").read_text()
