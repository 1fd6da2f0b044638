"""`batchinfer query RESULT` without SQL: queries from a pipe and from a terminal."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
import typer

from batchinfer.cli import app
from batchinfer.cli.query_prompt import PROMPT, is_whole
from batchinfer.report.history import HISTORY
from batchinfer.report.tables.columns.declared import SCHEMAS
from batchinfer.report.tables.queried import QUERIED
from batchinfer.verbs.query import RESULTS
from tests.batchinfer.cli.screen import lines_on, on_terminal
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Ended, Place
from tests.patience import PATIENCE_S, wait_until


@pytest.fixture
def piped(measured: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch):
    run = cli_of(NO_ENGINE)

    def ask(text: str, *arguments: str) -> Ended:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return run("query", measured.results, *arguments)

    return ask


@pytest.mark.parametrize(("text", "whole"), [
    ("select 1;", True),
    ("select 1; ", True),
    ("select 1; -- and a comment;", True),
    ("select 1; /* ; */", True),
    ("select 1", False),
    ("select ';", False),
    ("select ';'", False),
    ("select '';", True),
    ("select 'it''s;", False),
    ('select "a;', False),
    ('select 1 as "a;b";', True),
    ("select 1 -- ;", False),
    ("select 1 /* ;", False),
    ("select $$;", False),
    ("select $$'$$;", True),
    ("select $x$ $$ ; $x$;", True),
    ("", False),
    (";", True),
])  # fmt: skip
def test_where_a_query_ends(text: str, whole: bool) -> None:
    assert is_whole(text) == whole


def test_queries_from_a_pipe(piped) -> None:
    """A query over several lines, several queries in a line, and a last one without a semicolon."""
    ended = piped(
        "select 1\n  as n;\nselect 2 as n; select 3 as n;\nselect count(*) as n from results", "--json"
    )
    assert [json.loads(line)["n"] for line in ended.out.splitlines()] == [1, 2, 3, 50]
    assert (ended.code, ended.err) == (0, "")


def test_a_pipe_ends_at_the_first_error(piped) -> None:
    ended = piped("select 1 as n;\nselct 2;\nselect 3 as n;", "--format", "csv")
    assert (ended.code, ended.out) == (2, "n\n1\n")
    assert "DuckDB refuses the query" in ended.err
    assert "Traceback" not in ended.err
    assert piped("drop view results;").code == 2


def test_commands_from_a_pipe(piped) -> None:
    ended = piped(".tables\n.help\n.nonsense\n.quit\nselect 1;")
    assert ended.code == 0
    names = [line.split()[0] for line in ended.out.splitlines()[: len(QUERIED)]]
    assert set(names) == set(QUERIED)
    assert "Ctrl-D" in ended.out
    assert ".nonsense: no such command" in ended.err


def test_an_empty_pipe_gets_the_first_rows(piped) -> None:
    assert len(piped("\n", "--json").out.splitlines()) == 20
    assert piped("select 1 as n;\n", "--json").out == '{"n":1}\n', "and no other pipe does"


def test_the_help_names_the_tables_that_a_query_has() -> None:
    assert set(QUERIED) == {RESULTS, HISTORY, *SCHEMAS}
    sql = next(one for one in typer.main.get_command(app).commands["query"].params if one.name == "sql")  # type: ignore[attr-defined]
    told = re.search(r"Its tables: ([\w, ]+)\.", sql.help)
    assert told is not None
    assert told[1].split(", ") == list(QUERIED)


def test_typed_at_a_terminal(measured: Place, tmp_path: Path) -> None:
    """A wrong query, a query over two lines, a cancelled query; the next prompt has the history."""
    env = {
        **os.environ,
        "TERM": "xterm",
        "NO_COLOR": "1",
        "XDG_STATE_HOME": str(tmp_path),
        "HOME": str(tmp_path),
    }

    def talk(*keys: bytes) -> str:
        with on_terminal(["batchinfer", "query", str(measured.results)], measured.folder, env) as terminal:
            for at, typed in enumerate(keys):
                wait_until(lambda at=at: terminal.text.count(PROMPT) > at)  # type: ignore[misc]
                terminal.type(typed)
            assert terminal.wait(PATIENCE_S) == 0
            return terminal.text

    shown = lines_on(
        talk(b"selct 1;\n", b"select count(*) as rows\nfrom results;\n", b"select \x03", b".quit\n")
    )
    assert any("DuckDB refuses the query" in line for line in shown)
    assert any(line.strip() == "50" for line in shown)
    kept = tmp_path / "batchinfer" / "query_history"
    assert kept.stat().st_mode & 0o077 == 0
    assert "from results;" in kept.read_text()
    again = talk(b"\x1b[A\x1b[A\x1b[A\x1b[A\n", b"\x04")  # up to the first line
    assert "DuckDB refuses the query" in again
