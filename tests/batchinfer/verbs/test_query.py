"""`batchinfer query`: output, refused queries, and report tables alongside the results."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.verbs.answer import answer_lines, columns_of
from batchinfer.verbs.query import OpenResult, open_result
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Command, Ended, Place, copy_of, make_place, run_once

REPORT_PAGE = Path(__file__).parents[3] / "docs" / "report.md"
LONG = "a long answer of many words " * 20


@pytest.fixture
def ask(cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> Command:
    run = cli_of(NO_ENGINE)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return lambda *arguments: run("query", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    """A job that ran once. Tests that change it copy it. Tests that run it again create their own."""
    return run_once(make_place(tmp_path_factory.mktemp("finished") / "job", model))


@pytest.fixture
def copy(finished: Place, tmp_path: Path) -> Place:
    return copy_of(finished, tmp_path / "copy")


@pytest.fixture(scope="module")
def opened(finished: Place) -> Iterator[OpenResult]:
    with open_result(finished.results, partial=False) as result:
        yield result


def fetched(result: OpenResult, sql: str) -> list[tuple[Any, ...]]:
    with result.answer(sql) as found:
        return found.fetchall()


@cache
def database() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def answer(sql: str) -> duckdb.DuckDBPyRelation:
    return database().sql(sql)


# --- how an answer looks


def test_what_fits_is_a_table() -> None:
    assert list(
        answer_lines(answer("select 1 as n, 'ä' as t union all select 1000, null order by 1"), "auto", 80)
    ) == ["   n  t", "────  ────", "   1  ä", "1000  NULL"]


def test_what_does_not_fit_is_blocks_with_the_whole_text() -> None:
    lines = list(answer_lines(answer(f"select 7 as row_id, '{LONG}' as generated_text"), "auto", 60))
    assert lines[0].startswith("── 1 ──")
    assert lines[1] == "row_id          7"
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines[2:]).split()) == f"generated_text {LONG.strip()}"
    whole = list(answer_lines(answer(f"select '{LONG}' as t"), "blocks", None))
    assert whole[1] == f"t  {LONG.strip()}"  # lines are wrapped only on a terminal


def test_on_a_pipe_each_row_is_one_line_however_long() -> None:
    sql = f"select 1 as row_id, 'ok' as status, 'one' || chr(10) || 'two' as note, '{LONG}' as answer, 7 as n"
    lines = list(
        answer_lines(answer(f"{sql} union all select 2, 'ok', 'x', 'short', 8 order by row_id"), "auto", None)
    )
    assert lines[0].split() == ["row_id", "status", "note", "answer", "n"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]
    assert "one\\ntwo" in lines[2]
    assert LONG.strip() in lines[2]
    assert len(lines[3]) < 200, "a long value pads no other row to its width"


def test_texts_of_many_lines_stay_readable() -> None:
    lines = list(answer_lines(answer("select 'one\n  two\n\nthree' as t, 5 as n"), "auto", 80))
    assert lines[1:] == ["t  one", "     two", "", "   three", "n  5"]
    assert list(answer_lines(answer("select 'one\ntwo' as t"), "table", 80))[2] == "one\\ntwo"


def test_no_control_character_reaches_a_terminal() -> None:
    for form in ("table", "blocks"):
        text = "\n".join(
            answer_lines(answer("select 'a' || chr(27) || '[31mb' as \"x" + "\x1b" + '"'), form, 80)
        )
        assert "\x1b" not in text
        assert "a\\x1b[31mb" in text


def test_wide_characters_take_two_columns() -> None:
    assert (columns_of("abc"), columns_of("日本"), columns_of("e\u0301")) == (3, 4, 1)
    lines = list(
        answer_lines(answer("select '日本' as a, 1 as b union all select 'x', 2 order by b"), "table", 80)
    )
    assert [columns_of(line) for line in lines[1:]] == [columns_of(lines[1])] * 3


def test_values_that_python_does_not_have() -> None:
    sql = "select date '290000-01-01' as d, 1 as a, 2 as a, '\\xff'::blob as b, 'nan'::double as x, [1, null] as l"
    assert list(answer_lines(answer(sql), "csv", None))[1] == '290000-01-01,1,2,\\xFF,nan,"[1,null]"'
    (line,) = answer_lines(answer(sql), "jsonl", None)
    assert json.loads(line, parse_constant=pytest.fail) == {
        "d": "290000-01-01", "a": 1, "a_1": 2, "b": "\\xFF", "x": None, "l": [1, None],
    }  # fmt: skip


def test_csv_can_be_read_again() -> None:
    lines = answer_lines(
        answer("""select 'a,"b"' as "x,y", '' as e, null as n, 'one' || chr(10) || 'two' as t"""), "csv", None
    )
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    assert rows == [["x,y", "e", "n", "t"], ['a,"b"', "", "", "one\ntwo"]]


@pytest.mark.parametrize(
    "text", ["=1+2", "+x", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "=1", "-5-5", '=A1&"x"']
)
def test_formulas_are_escaped_on_request(text: str) -> None:
    quoted = "'" + text.replace("'", "''") + "'"
    sql = f'select {quoted} as t, [{quoted}] as l, {quoted} as "{text.replace(chr(34), chr(34) * 2)}"'
    for escape, wanted in ((False, text), (True, "'" + text)):
        lines = "\n".join(answer_lines(answer(sql), "csv", None, escape))
        names, row = csv.reader(io.StringIO(lines, newline=""))
        assert (row[0], row[2], names[2]) == (wanted, wanted, wanted)


def test_numbers_are_no_formulas() -> None:
    sql = "select -5 as i, -2.5e-7 as f, '-5' as t, '+1.5' as u, '-inf'::double as n, 'a=1' as later, '-' as dash"
    assert list(answer_lines(answer(sql), "csv", None, True))[1] == "-5,-2.5e-07,-5,+1.5,-inf,a=1,'-"


def test_csv_has_structs_and_lists_as_json() -> None:
    sql = """select {'a': 'x,"y"', 'b': [1, null]} as s, [{'c': date '2024-01-02'}] as l, map {'k': 'nan'::double} as m,
        [1, 2]::int[2] as f, null::int[] as n, 7 as s"""
    (row,) = csv.reader(io.StringIO(list(answer_lines(answer(sql), "csv", None))[1]))
    assert [json.loads(cell) if cell else None for cell in row] == [
        {"a": 'x,"y"', "b": [1, None]},
        [{"c": "2024-01-02"}],
        {"k": None},
        [1, 2],
        None,
        7,
    ]


def test_an_answer_without_rows_has_its_columns() -> None:
    for form in ("table", "csv"):
        assert "n" in next(iter(answer_lines(answer("select 1 as n where false"), form, 80)))
    assert list(answer_lines(answer("select 1 as n where false"), "jsonl", 80)) == []


def test_many_rows_are_streamed() -> None:
    lines = answer_lines(answer("select i from range(100000000) t(i)"), "csv", None)
    assert [next(lines) for _ in range(3)] == ["i", "0", "1"]


# --- the verb


def test_the_first_rows_by_default(finished: Place, ask: Command) -> None:
    ended = ask(finished.results)
    assert ended.code == 0
    heading, _, *rows = ended.out.splitlines()
    assert "generated_text" in heading.split()
    assert len(rows) == 20


@pytest.mark.parametrize("arguments", [("--format", "json"), ("--json",)])
def test_json_for_programs(finished: Place, ask: Command, arguments: tuple[str, ...]) -> None:
    ended = ask(finished.results, "select row_id, status from results", *arguments)
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert rows == [{"row_id": n, "status": "ok"} for n in range(20)]


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.jsonl"])
def test_an_answer_goes_to_a_file_by_its_ending(copy: Place, ask: Command, name: str) -> None:
    file = copy.folder / name
    assert ask(copy.results, "select row_id, text from results", "--output", file).code == 0
    assert duckdb.sql(f"select count(*), max(row_id) from '{file}'").fetchall() == [(20, 19)]
    before = file.read_bytes()
    again = ask(copy.results, "select 1", "-o", file)
    assert (again.code, "is there already" in again.err) == (73, True)
    assert file.read_bytes() == before


def test_a_format_that_cannot_be(finished: Place, ask: Command) -> None:
    wrong = ask(finished.results, "--format", "xml")
    assert (wrong.code, "table, blocks, json, jsonl, csv, parquet" in wrong.err) == (2, True)
    without = ask(finished.results, "-f", "parquet")
    assert (without.code, "--output FILE" in without.err) == (2, True)
    escaped = ask(finished.results, "select '=1' as x", "--escape-formulas")
    assert (escaped.code, escaped.out) == (0, "x\n'=1\n")
    refused = ask(finished.results, "select 1", "--json", "--escape-formulas")
    assert (refused.code, "--escape-formulas is for CSV" in refused.err) == (2, True)
    both = ask(finished.results, "--json", "--format", "csv")
    assert (both.code, "leave one of the two out" in both.err) == (2, True)
    assert ask(finished.results, "select 1 as n", "--json", "--format", "jsonl").out == '{"n":1}\n'


@pytest.mark.parametrize("sql", [
    "selct 1",
    "select nothing from results",
    "from nowhere",
    "select error('boom')",
    "select cast('x' as int) from results",
    "select * from read_parquet('gone.parquet')",
    "",
    "select 1; select 2",
    "explain",
    "explain explain select 1",
    "from results where",
])  # fmt: skip
def test_wrong_sql_is_a_usage_error(opened: OpenResult, sql: str) -> None:
    with pytest.raises(UsageError):
        fetched(opened, sql)


def test_a_wrong_name_is_reported_with_the_valid_ones(finished: Place, ask: Command) -> None:
    ended = ask(finished.results, "from nowhere")
    assert ended.code == 2
    assert (
        "Tables here: results, run, history, steps, requests, rows, experts, ranks, activities, phases, buckets, "
        "prefixes, accuracy, confusion, calibration." in ended.err
    )


WRITES = [
    "copy results to '{file}'",
    "copy (pivot results on status using count(*)) to '{file}'",
    "explain analyze copy results to '{file}'",
    "explain (analyze) copy results to '{file}'",
    "explain /* x */ analyze copy results to '{file}'",
    "explain analyze /* x */ copy results to '{file}'",
    "/* x */ explain analyze copy results to '{file}'",
    "select * from query('copy results to ''{file}''')",
    "attach '{file}' as x",
    "export database '{file}'",
    "create table x as from results",
    "drop view results",
    "delete from results",
    "set threads = 1",
    "pragma database_list",
    "install httpfs",
    "load httpfs",
    "call pragma_version()",
]


def test_what_writes_is_refused(finished: Place, opened: OpenResult) -> None:
    file = finished.folder / "written"
    before = finished.published()
    for sql in WRITES:
        with pytest.raises(UsageError):
            fetched(opened, sql.format(file=file))
        assert not file.exists(), sql
    assert finished.published() == before
    assert fetched(opened, "select count(*) from results") == [(20,)]


@pytest.mark.parametrize("sql", [
    "explain select 1",
    "explain analyze from results",
    "describe results",
    "show tables",
    "summarize results",
    "pivot results on status using count(*)",
    "with x as (from results) select count(*) from x",
    "values (1)",
    "/* a comment */ select 1;",
])  # fmt: skip
def test_what_reads_is_answered(opened: OpenResult, sql: str) -> None:
    assert fetched(opened, sql)


def test_where_there_is_no_result(finished: Place, ask: Command) -> None:
    for folder, words in (
        (finished.folder / "nothing", "output.path"),
        (finished.folder / "job.yaml", "is a file; name the result folder"),
        (finished.folder / "out", f"below it: {finished.results}"),
        (finished.folder / "model", "`batchinfer run` publishes it"),
    ):
        ended = ask(folder)
        assert (ended.code, words in ended.err) == (66, True), ended.err
    over = ask(finished.results, "--partial")
    assert (over.code, "no unfinished run" in over.err) == (66, True)


def test_a_damaged_result_is_no_usage_error(copy: Place, ask: Command) -> None:
    (part,) = copy.results.glob("*.parquet")
    data = part.read_bytes()
    part.write_bytes(data[:-10])
    ended = ask(copy.results)
    assert (ended.code, "batchinfer verify" in ended.err) == (74, True)
    part.write_bytes(b"x" * len(data))
    ended = ask(copy.results, "select generated_text from results")
    assert (ended.code, "batchinfer verify" in ended.err) == (74, True)


# --- the report's tables


def queries() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", REPORT_PAGE.read_text("utf-8"), re.DOTALL)


def test_documented_queries_of_the_report_work(
    tmp_path: Path, model: Path, ask: Command, cli_of: CliOf
) -> None:
    """Also after a night that removed one row and added one: kept rows refer to the run that computed them."""
    place, night = make_place(tmp_path / "job", model), cli_of()
    assert night("run", place.folder / "job.yaml", "-q").code == 0
    runs, join, history = queries()
    assert len(ask(place.results, history, "--json").out.splitlines()) == 1
    assert len(ask(place.results, runs, "--json").out.splitlines()) == 1
    (first,) = {row["run_id"] for row in objects(ask(place.results, join, "--json"))}
    place.rows(*({"id": f"r{i}", "text": f"word {i}"} for i in (*range(3, 20), 77)))
    assert night("run", place.folder / "job.yaml", "-q").code == 0
    found = objects(ask(place.results, join, "--json"))
    assert {row["custom_id"] for row in found if row["run_id"] != first} == {"r77"}
    names = ("row_id", "custom_id", "completion_tokens")
    published = objects(ask(place.results, f"select {', '.join(names)} from results", "--json"))
    assert sorted(row["row_id"] for row in found) == list(range(18))
    assert {tuple(row[name] for name in names) for row in found} == {tuple(row.values()) for row in published}


def objects(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.out.splitlines()]


def test_a_report_folder_is_queried_like_its_result(copy: Place, ask: Command) -> None:
    report = copy.results.with_name("res-report")
    tables = ("results", "rows", "run")
    counts = "select " + ", ".join(f"(select count(*) from {table}) as {table}" for table in tables)
    for folder in (report, copy.results):
        with open_result(folder, partial=False) as result:
            assert fetched(result, counts) == [(20, 20, 1)]
    shutil.rmtree(copy.results)
    ended = ask(report, "--json")
    assert json.loads(ended.out)["exit_code"] == 0
    assert (
        "Tables here: run, history, steps, requests, rows, experts, ranks, activities, phases, buckets, prefixes, "
        "accuracy, confusion, calibration." in ask(report, "from results").err
    )


def test_every_report_table_carries_the_run(opened: OpenResult) -> None:
    runs = fetched(opened, "select run_id from run")
    for table in ("steps", "requests", "rows", "phases", "buckets"):
        assert fetched(opened, f"select distinct run_id from {table}") == runs


def test_tables_of_older_runs_are_read_too(copy: Place, ask: Command) -> None:
    report = copy.results.with_name("res-report")
    old = pa.table({"key": ["ab"], "engine": pa.array([0], pa.int64())})
    pq.write_table(old, report / "requests-20200101T000000Z-abcdef.parquet")
    pq.write_table(old, report / "requests-mine.parquet")  # a file of no run
    assert (
        ask(copy.results, "select count(*) as n from requests where run_id is null", "--json").out
        == '{"n":1}\n'
    )
    for newer in report.glob("requests-202[1-9]*"):
        newer.unlink()
    assert ask(copy.results, "select key, latency_s from requests", "--json").out == (
        '{"key":"ab","latency_s":null}\n'
    )


def test_a_published_result_holds_no_key(finished: Place) -> None:
    assert "key" not in finished.table()[0]
