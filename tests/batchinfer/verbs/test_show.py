"""`batchinfer show`, and the sample answers in the summary of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchinfer.core.errors import UsageError
from batchinfer.verbs.answer import columns_of
from batchinfer.verbs.show import ShownRows, example_lines
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Command, Place, make_place, run_once

EVIL = "red\x1b[31m \u202eback \u2066isolated\x07"
LONG = "many words " * 60


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    """Fifteen rows: one with terminal escapes, one too long to run, one in Japanese, and an invalid one."""
    place = make_place(tmp_path_factory.mktemp("shown") / "job", model)
    texts = [EVIL, LONG, "日本語の文" * 30, *(f"word {number}" for number in range(11))]
    place.rows(*({"id": f"r{at}", "text": text} for at, text in enumerate(texts)), b"{bad")
    place.job("on_error: {max_error_rate: 0.5}")
    return run_once(place)


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(NO_ENGINE)


def test_rows_are_cards(finished: Place, run: Command) -> None:
    ended = run("show", finished.results)
    lines = ended.out.splitlines()
    heads = [line for line in lines if line.startswith("── ")]
    assert [re.split(" ?─+ ?", head)[1] for head in heads] == [
        f"row {n} · r{n} · {'error' if n == 1 else 'ok'}" for n in range(10)
    ]
    assert {columns_of(head) for head in heads} == {80}
    assert sum(line.startswith("generated_text") for line in lines) == 9
    assert lines[-1] == "10 of 15 rows, 2 error rows; --rows N shows more; --errors shows these"


def test_texts_cannot_control_or_flood_the_terminal(finished: Place, run: Command) -> None:
    out = run("show", finished.results, "--rows", 3).out
    assert r"text            red\x1b[31m \u202eback \u2066isolated\x07" in out
    assert not re.search("[\x1b\u202e\u2066\x07]", out)
    assert re.search(r"… about 2\d\d characters more\n", out)
    assert max(map(columns_of, out.splitlines())) <= 80
    assert out.count("日本語") >= 10


def test_errors_are_shown_with_code_and_message(finished: Place, run: Command) -> None:
    out = run("show", finished.results, "--errors").out
    assert re.search(r"^── row 14 · error ─+\nerror  bad_json: \S", out, re.MULTILINE)
    assert out.endswith("\n2 of 2 error rows\n")


def test_a_condition_chooses_rows(finished: Place, run: Command) -> None:
    out = run("show", finished.results, "--where", "custom_id = 'r7' -- this one").out
    assert ("row 7" in out, out.count("── ")) == (True, 1)
    none = run("show", finished.results, "--where", "custom_id = 'nobody'", "--errors")
    assert (none.code, none.out) == (0, "no error row with custom_id = 'nobody'; the result has 15 rows\n")
    wrong = run("show", finished.results, "--where", "label = 'bug'")
    assert (wrong.code, '"label" not found' in wrong.err) == (2, True), wrong.err


def test_a_condition_is_a_condition(finished: Place) -> None:
    with pytest.raises(UsageError):
        list(ShownRows(finished.results, 1, where="true); DROP VIEW results; SELECT (1").cards(80))


def test_json_for_programs_is_uncut(finished: Place, run: Command) -> None:
    rows = [
        json.loads(line) for line in run("show", finished.results, "--rows", 2, "--json").out.splitlines()
    ]
    assert [row["text"] for row in rows] == [EVIL, LONG]


def test_a_report_folder_shows_its_result_and_a_missing_folder_an_error(
    finished: Place, run: Command, tmp_path: Path
) -> None:
    assert run("show", finished.results.with_name("res-report"), "--rows", 1).out.startswith("── row 0")
    missing = run("show", tmp_path / "nowhere")
    assert (missing.code, "there is no such folder" in missing.err) == (66, True)


def test_a_terminal_shows_three_answers_after_a_run_and_a_log_none(
    finished: Place, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = run("run", finished.folder / "job.yaml").out
    assert logged.splitlines()[-1] == f"  next     batchinfer show {finished.results}"
    assert "answers" not in logged
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = run("run", finished.folder / "job.yaml").out.splitlines()
    assert [line[:13] for line in lines[-4:-1]] == ["  answers  r0", "           r2", "           r3"]
    assert max(map(columns_of, lines[-4:-1])) <= 60
    assert lines[-1].startswith("  next ")


def test_a_removed_result_shows_no_examples(tmp_path: Path) -> None:
    assert example_lines(tmp_path / "nowhere", 80) == []
