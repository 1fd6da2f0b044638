"""Implements `batchinfer query`: SQL queries on a result and on the report of its runs. Nothing is changed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.core.errors import InputMissing, Interrupted, OutOfMemory, StorageError, UsageError
from batchinfer.filesystem.duck import Watched, interruptible, literal, parquet
from batchinfer.filesystem.durable import FileOps, refuse_existing, write_new
from batchinfer.filesystem.json_files import read_strings
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.report.history import HISTORY, history_sql
from batchinfer.report.tables.columns.declared import ROWS, RUN, SCHEMAS
from batchinfer.report.tables.folder import report_folder, tables
from batchinfer.store.index.index import MARKER, Index
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.manifest import read_manifest
from batchinfer.store.results.published import open_published
from batchinfer.verbs.answer import answer_lines, check_format, format_for
from batchinfer.verbs.history import add_report_view

RESULTS = "results"
FIRST_ROWS = "FROM results LIMIT 20"
RUNS = "FROM run ORDER BY run_id DESC LIMIT 20"
_NAMED = 5  # maximum number of results in a message
_BEGINNING = (
    "its run is still reading the input: --partial has rows once it computes, and `batchinfer status {folder}` says "
    "how far it is"
)
_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(ANALYZE\s+)?(\([^)]*\)\s*)?", re.IGNORECASE)
# DuckDB parses PIVOT as several statements
_PIVOT = re.compile(r"\s*(PIVOT|WITH|FROM|SELECT)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """The result folder and the report folder of a job. Either may be None if it does not exist, but not both."""

    results: Path | None
    report: Path | None

    @classmethod
    def of(cls, folder: Path) -> ResultPlace:
        """Find the result and the report of the job that a folder belongs to.

        Args:
            folder: A result folder or a report folder.

        Raises:
            InputMissing: The folder has neither a result nor a report.
        """
        if read_manifest(Location.at(folder)) is not None:
            report = report_folder(find_state(folder).root)
            return cls(folder, report if tables(report, RUN) else None)
        if tables(folder, RUN):
            return cls(_reported(folder), folder)
        raise InputMissing(no_result(folder))

    @property
    def ending(self) -> str:
        """Return the end of the path of the result folder, such as "/answers".

        The runs in the report whose `output` ends with it have made this result, also after the folders were moved.
        It is "" if the result or the report is missing.
        """
        if self.results is None or self.report is None:
            return ""
        name = os.path.relpath(self.results.absolute(), self.report.absolute().parent)
        return "/" + name.removeprefix("../")


def _reported(report: Path) -> Path | None:
    folder = report.absolute()
    results = folder.with_name(folder.name.removesuffix("-report"))
    return results if results != folder and read_manifest(Location.at(results)) is not None else None


def no_result(folder: Path) -> str:
    """Return an error message for a folder that has no published result: the reason, and what to do."""
    state = find_state(folder)
    if any(state.scratch.glob(f"*/{MARKER}")):
        return f"{folder}: no published result there yet; --partial reads what its run has finished so far"
    if _is_running(state):
        return f"{folder}: no published result there yet; {_BEGINNING.format(folder=folder)}"
    if not folder.exists():
        return f"{folder}: there is no such folder; the result folder is `output.path` of the job file"
    if not folder.is_dir():
        return f"{folder}: is a file; name the result folder, which is `output.path` of the job file"
    found = [path.parent for path in sorted(folder.glob("*/_manifest.json"))]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"{folder}: no result there, but below it: {', '.join(map(str, found[:_NAMED]))}{more}"
    return f"{folder}: no published result there; `batchinfer run` publishes it, --partial reads an unfinished run"


def _is_running(state: StateFolder) -> bool:
    return state.path.is_dir() and state.is_running(state.path)


class OpenResult:
    """A database with a result and its report as tables, for the queries of a user.

    Attributes:
        names: The names of the tables.
        usual: The query that runs if the user gives none.
    """

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> None:
        self._folder, self._connection = folder, connection
        self.names = tuple(names)
        self.usual = FIRST_ROWS if RESULTS in names else RUNS

    def statements(self, text: str) -> list[str]:
        """Split an SQL text into its statements. Raises UsageError if the text is not SQL."""
        with _explained(self._folder, self.names):
            return [str(statement.query) for statement in self._connection.extract_statements(text)]

    @contextmanager
    def answer(self, sql: str) -> Iterator[duckdb.DuckDBPyRelation]:
        """Yield the answer to an SQL statement.

        DuckDB computes it while it is read in the `with` block; a signal ends it.

        Raises:
            UsageError: The SQL fails, or would change something. Also raised while the answer is read.
            StorageError: The result was damaged or replaced.
            OutOfMemory: The query needs too much memory.
        """
        with interruptible(self._connection), _explained(self._folder, self.names):
            yield self._connection.sql(_reading(self._connection, sql))


@contextmanager
def open_result(folder: Path, partial: bool) -> Iterator[OpenResult]:
    """Open a result or report folder as a database, for the `with` block.

    Its tables are `results`, which is the published result, and the tables of the report.

    Args:
        folder: The folder.
        partial: True to open only the committed answers of an unfinished run, as the table `results`.

    Raises:
        InputMissing: The folder has no result.
        StorageError: A file is damaged.
    """
    with _database() as (connection, spill):
        if partial:
            with interruptible(connection) as watched:
                names = _add_results(connection, [_partial(folder, spill, watched)])
        else:
            names = add_views(connection, ResultPlace.of(folder))
        yield OpenResult(folder, connection, names)


@contextmanager
def open_answer(folder: Path, sql: str | None, partial: bool) -> Iterator[duckdb.DuckDBPyRelation]:
    """Open a result and yield the answer to a query. It can be read in the `with` block.

    Raises the errors of `open_result` and `OpenResult.answer`.

    Args:
        folder: The result or report folder.
        sql: The query. None for the default query: the first rows of the result, or a report folder's newest runs.
        partial: True to read the committed answers of an unfinished run.
    """
    with (
        open_result(folder, partial) as result,
        result.answer(result.usual if sql is None else sql) as answer,
    ):
        yield answer


@contextmanager
def open_database() -> Iterator[tuple[duckdb.DuckDBPyConnection, Watched, Path]]:
    """Yield an empty DuckDB database for a user's queries. A signal such as Ctrl-C interrupts a running query.

    Yields:
        (the connection, the object that watches for signals, a folder for data that does not fit in memory).
    """
    with _database() as (connection, spill), interruptible(connection) as watched:
        yield connection, watched, spill


@contextmanager
def _database() -> Iterator[tuple[duckdb.DuckDBPyConnection, Path]]:
    with temporary_folder("query") as spill:
        config: dict[str, Any] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",  # table names never refer to Python variables
            "temp_directory": f"{spill}/sorting",  # not the user's working directory
        }
        with duckdb.connect(config=config) as connection:
            yield connection, Path(spill)


def add_views(connection: duckdb.DuckDBPyConnection, place: ResultPlace) -> list[str]:
    """Create a view of the result, named `results`, and a view of each report table.

    Args:
        connection: The database.
        place: The folders of the result and the report.

    Returns:
        The names of the views.

    Raises:
        StorageError: A file is damaged.
    """
    return _results(connection, place.results) + _reports(connection, place)


def _results(connection: duckdb.DuckDBPyConnection, results: Path | None) -> list[str]:
    found = None if results is None else open_published(Location.at(results))
    return [] if found is None else _add_results(connection, found.files)


def _reports(connection: duckdb.DuckDBPyConnection, place: ResultPlace) -> list[str]:
    # A report covers all results of a job, including other dates and trials; `rows` is limited to this result
    names: list[str] = []
    for name, schema in SCHEMAS.items() if place.report is not None else ():
        files = tables(place.report, name) if place.report is not None else []
        if files:
            names += _add_reported(connection, name, files, _made(place) if name == ROWS else "")
        else:
            connection.register(name, schema.empty_table())
            names.append(name)
    return names


def _add_reported(
    connection: duckdb.DuckDBPyConnection, name: str, files: Sequence[Path], where: str
) -> list[str]:
    try:
        add_report_view(connection, name, files, where)
        if name == RUN:
            connection.execute(f'CREATE VIEW "{HISTORY}" AS {history_sql(RUN)}')
    except duckdb.Error as error:
        raise StorageError(f"{files[0].parent}: {error}; move a damaged table away") from error
    return [RUN, HISTORY] if name == RUN else [name]


def _made(place: ResultPlace) -> str:
    if not place.ending:
        return ""
    return f" WHERE run_id IN (SELECT run_id FROM run WHERE ends_with(output, {literal(place.ending)}))"


def _add_results(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> list[str]:
    try:
        connection.execute(f'CREATE VIEW "{RESULTS}" AS FROM {parquet(files, ", union_by_name = true")}')
    except duckdb.Error as error:
        raise StorageError(f"{files[0].parent}: {error}; `batchinfer verify` checks a result") from error
    return [RESULTS]


def _partial(results: Path, spill: Path, watched: Watched) -> Path:
    # Written to a file because a query may read its table several times, while a stream can be read once
    # These imports take 130 ms, which queries of a published result do not need
    from batchinfer.input.tokenizer.tokenizer import Tokenizer
    from batchinfer.store.results.partial import PARTIAL, partial_reader, with_known_prior, write_partial

    state = find_state(results)
    indexes = sorted(state.scratch.glob(f"*/{MARKER}"), key=lambda p: p.stat().st_mtime)
    if not indexes and _is_running(state):
        raise InputMissing(f"{results}: nothing is finished yet; {_BEGINNING.format(folder=results)}")
    if not indexes:
        raise InputMissing(
            f"{results}: no unfinished run there; without --partial the published result is read"
        )
    folder = indexes[-1].parent
    where = read_strings(folder / PARTIAL)
    if not where:
        raise InputMissing(f"{results}: the run has finished nothing yet; try again later")
    tokenizer = Tokenizer.load(Path(where["model"]))
    completions = Path(where["completions"])
    index = with_known_prior(Index.open(folder), completions, spill, watched)
    reader = partial_reader(index, completions, tokenizer, spill, watched=watched)
    write_partial(reader, spill / "partial.parquet")
    return spill / "partial.parquet"


def _reading(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(f"the query has {len(statements)} statements; give one")
    (statement,) = statements
    inner = statement
    if statement.type == duckdb.StatementType.EXPLAIN:  # EXPLAIN ANALYZE runs what it explains
        (inner,) = connection.extract_statements(_EXPLAIN.sub("", statement.query, count=1))
    pivot = inner.type == duckdb.StatementType.MULTI and _PIVOT.match(inner.query)
    if inner.type != duckdb.StatementType.SELECT and not pivot:
        raise UsageError(
            f"query only reads, and this is a statement of type {inner.type.name}; to keep an answer, name a file: "
            "--output FILE"
        )
    return str(statement.query)


@contextmanager
def _explained(folder: Path, names: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise OutOfMemory(f"the query needs more memory than there is: {error}") from error
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) and str(folder) in str(error):
            raise StorageError(
                f"{folder}: {error}; the result was replaced or damaged during the query: repeat the query, or run "
                f"`batchinfer verify {folder}`"
            ) from error
        raise UsageError(f"DuckDB refuses the query: {error}\nTables here: {', '.join(names)}.") from error
    except RuntimeError as error:
        if "interrupted" not in str(error).lower():
            raise
        raise Interrupted(signal.SIGINT, "interrupted") from error


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a user, and the result or report folder that it reads.

    Attributes:
        folder: The result or report folder.
        sql: The query. None for the default query: the first rows of the result, or a report folder's newest runs.
        partial: True to read the committed answers of an unfinished run.
        escape_formulas: True to put an apostrophe before CSV cells that spreadsheet programs would run as formulas.
    """

    folder: Path
    sql: str | None = None
    partial: bool = False
    escape_formulas: bool = False

    def lines(self, form: str, width: int | None) -> Iterator[str]:
        """Run the query, and yield the lines of its answer for stdout. Raises the errors of `open_answer`.

        Args:
            form: The format.
            width: The width of the terminal in columns, or None if stdout is no terminal.
        """
        check_format(form, None)
        with open_answer(self.folder, self.sql, self.partial) as answer:
            yield from answer_lines(answer, form, width, self.escape_formulas)

    def save(self, form: str, output: Path) -> None:
        """Run the query, and write its answer to a new file, which appears when it is complete.

        Raises the errors of `open_answer`.

        Args:
            form: The format, or "auto" for the suffix of the file.
            output: The file.

        Raises:
            OutputConflict: The file exists.
        """
        form = format_for(form, output)
        check_format(form, output)
        refuse_existing(output)
        with open_answer(self.folder, self.sql, self.partial) as answer:
            if form != "parquet":
                lines = answer_lines(answer, form, None, self.escape_formulas)
                write_new(output, ((line + "\n").encode() for line in lines), FileOps())
                return
            with temporary_folder("answer") as spill:
                answer.write_parquet(f"{spill}/answer.parquet", compression="zstd")
                write_new(output, _pieces(Path(spill, "answer.parquet")), FileOps())


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece
