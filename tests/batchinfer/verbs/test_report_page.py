"""`batchinfer report`: the choice of the run, the path of the page, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.batchinfer.report.parsed_page import ParsedPage
from tests.batchinfer.report.reported_runs import write_tables
from tests.batchinfer.wrong_jobs import (
    FAKE,
    NO_ENGINE,
    ROWS,
    CliOf,
    Command,
    Place,
    copy_of,
    make_place,
    run_once,
)


@pytest.fixture
def ask(cli_of: CliOf) -> Command:
    run = cli_of(NO_ENGINE)
    return lambda *arguments: run("report", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    """A job of 20 valid and three invalid rows that ran once."""
    place = make_place(tmp_path_factory.mktemp("finished") / "job", model)
    place.rows(*ROWS, b"{no json", b"[]", {"id": "</script><b>", "text": "tell"})
    place.job("on_error: {max_error_rate: 1}", sampling="sampling: {max_tokens: 8}")
    return run_once(place)


@pytest.fixture
def copy(finished: Place, tmp_path: Path) -> Place:
    return copy_of(finished, tmp_path / "copy")


def report_of(place: Place) -> Path:
    return place.results.with_name("res-report")


def test_a_result_has_a_page(copy: Place, ask: Command) -> None:
    ended = ask(copy.results, "--json")
    told = json.loads(ended.out)
    path = report_of(copy) / "report.html"
    assert told == {"exit_code": 0, "path": str(path), "bytes": path.stat().st_size, "run_id": told["run_id"],
                    "exit_status": "published"}  # fmt: skip
    page = ParsedPage(path.read_text("utf-8"))
    assert sum(page.tables["prompts-table"].column("requests")) == 21
    errors = page.tables["errors-table"]
    assert sum(errors.column("rows")) == 2
    assert "row 20" in ", ".join(errors.column("examples"))
    assert "no json" not in page.text  # no text of a row


def test_a_page_is_replaced_by_that_of_a_report_folder_and_nothing_else_is(copy: Place, ask: Command) -> None:
    page, mine = report_of(copy) / "report.html", copy.folder / "mine.html"
    assert ask(copy.results).out.startswith(f"wrote {page} (")
    written = page.read_bytes()
    page.write_bytes(written + b"<!-- older -->")
    assert ask(report_of(copy), "--output", page).code == 0
    assert page.read_bytes() == written
    mine.write_text("<!doctype html>\nmine")
    ended = ask(copy.results, "-o", mine)
    assert ended.code == 73
    assert "batchinfer did not write it" in ended.err
    assert mine.read_text() == "<!doctype html>\nmine"


@pytest.mark.slow
def test_the_newest_run_of_this_result_is_shown_or_the_one_that_is_named(copy: Place, ask: Command) -> None:
    report = report_of(copy)
    (first,) = report.glob("run-*.parquet")
    first_id = first.stem.removeprefix("run-")
    # later runs: a trial, which has a result of its own, and one that failed
    write_tables(
        report, steps=0, requests=0, run_id="20990101T000000Z-abcdef", output=f"{copy.results}-first-5"
    )
    assert first_id in ask(copy.results).out
    assert "20990101" in ask(report).out
    failed = {"exit_status": "over budget", "exit_code": 65, "error_codes": {"bad_json": 15}}
    write_tables(
        report, steps=0, requests=0, run_id="20980101T000000Z-abcdef", output=str(copy.results), **failed
    )
    assert "20980101" in ask(copy.results).out
    page = ParsedPage((report / "report.html").read_text("utf-8"))
    assert "over budget, exit code 65" in page.text
    assert "row 20" not in page.text  # these ids belong to another run's result
    assert first_id in ask(copy.results, "--run", first_id).out
    ended = ask(copy.results, "--run", "20110101T000000Z-abcdef")
    assert ended.code == 66
    assert "batchinfer history" in ended.err


def test_a_result_that_no_run_has_published(tmp_path: Path, ask: Command) -> None:
    results = tmp_path / "res"
    facts = {"exit_status": "interrupted", "exit_code": 130, "rows_ok": None}
    write_tables(tmp_path / "res-report", 20, 20, output=str(results), **facts)
    assert ask(results).code == 0
    assert (
        "interrupted, exit code 130"
        in ParsedPage((tmp_path / "res-report/report.html").read_text("utf-8")).text
    )


def test_a_run_that_refused_its_rows_counts_them(place: Place, cli_of: CliOf) -> None:
    place.rows(*ROWS, b"{no json", b"[]")
    run = cli_of(FAKE)
    assert run("run", place.folder / "job.yaml", "-q").code == 65
    assert run("report", place.results).code == 0
    page = ParsedPage((report_of(place) / "report.html").read_text("utf-8"))
    assert sum(page.tables["errors-table"].column("rows")) == 2
    assert "over budget, exit code 65" in page.text


def test_an_empty_input_has_a_page_where_the_job_allows_it(place: Place, cli_of: CliOf) -> None:
    place.rows()
    run = cli_of(FAKE)
    assert run("run", place.folder / "job.yaml", "-q", "--set", "input.allow_empty=true").code == 0
    assert run("report", place.results).code == 0
    assert "the input has no rows" in (report_of(place) / "report.html").read_text("utf-8")


def test_a_crashed_run_is_mentioned(copy: Place, cli_of: CliOf) -> None:
    """It has no table. The page shows the previous run; without one, the message says so."""
    progress = copy.state / "progress.json"
    crashed = json.loads(progress.read_text()) | {"exit_status": None, "run_id": "20990101T000000Z-abcdef"}
    progress.write_text(json.dumps(crashed))
    run = cli_of(NO_ENGINE)
    assert run("report", copy.results).code == 0
    assert "A newer run crashed" in (report_of(copy) / "report.html").read_text("utf-8")
    shutil.rmtree(report_of(copy))
    shutil.rmtree(copy.results)
    ended = run("report", copy.results)
    assert ended.code == 66
    assert "the last run crashed" in ended.err


def test_a_result_without_a_report(copy: Place, ask: Command) -> None:
    shutil.rmtree(report_of(copy))
    ended = ask(copy.results)
    assert ended.code == 66
    assert "no run has written a report yet" in ended.err
    assert ask(copy.folder / "nothing").code == 66


def test_a_damaged_table_is_named(copy: Place, ask: Command) -> None:
    (steps,) = report_of(copy).glob("steps-*.parquet")
    steps.write_bytes(b"damaged")
    ended = ask(copy.results)
    assert ended.code == 74
    assert steps.name in ended.err or str(report_of(copy)) in ended.err
    assert not (report_of(copy) / "report.html").exists()
