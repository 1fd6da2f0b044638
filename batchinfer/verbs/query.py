"""`batchinfer query`: one SQL query over a result and over the report of the runs that made it. Nothing is changed."""

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
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.remembered import read_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.report.history import HISTORY, history_sql
from batchinfer.report.tables.columns.declared import ROWS, RUN, SCHEMAS
from batchinfer.report.tables.folder import report_folder, tables
from batchinfer.store.index.index import MARKER, Index
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.manifest import read_manifest
from batchinfer.store.results.published import published
from batchinfer.verbs.answer import check_format, format_for, shown
from batchinfer.verbs.history import add_report_view

RESULTS = "results"
FIRST_ROWS = "FROM results LIMIT 20"
RUNS = "FROM run ORDER BY run_id DESC LIMIT 20"
_NAMED = 5  # results that a message lists
_BEGINNING = (
    "its run is still reading the input: --partial has rows once it computes, and `batchinfer status {folder}` says "
    "how far it is"
)
_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(ANALYZE\s+)?(\([^)]*\)\s*)?", re.IGNORECASE)
_PIVOT = re.compile(r"\s*(PIVOT|WITH|FROM|SELECT)\b", re.IGNORECASE)  # to DuckDB, PIVOT is several statements


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Where a result and its report lie; either may be missing, not both."""

    results: Path | None
    report: Path | None

    @classmethod
    def of(cls, folder: Path) -> ResultPlace:
        """The place that a result's folder or a report's folder names. Raises InputMissing for any other."""
        if read_manifest(Location.at(folder)) is not None:
            report = report_folder(find_state(folder).root)
            return cls(folder, report if tables(report, RUN) else None)
        if tables(folder, RUN):
            return cls(_reported(folder), folder)
        raise InputMissing(no_result(folder))

    @property
    def ending(self) -> str:
        """How `output` of the runs that made this result ends. Where all was moved together, its name still says so."""
        if self.results is None or self.report is None:
            return ""
        name = os.path.relpath(self.results.absolute(), self.report.absolute().parent)
        return "/" + name.removeprefix("../")


def _reported(report: Path) -> Path | None:
    """Return the result of a report, if it lies next to it."""
    folder = report.absolute()
    results = folder.with_name(folder.name.removesuffix("-report"))
    return results if results != folder and read_manifest(Location.at(results)) is not None else None


def no_result(folder: Path) -> str:
    """Why a folder holds no result, and where one may be."""
    state = find_state(folder)
    if any(state.scratch.glob(f"*/{MARKER}")):
        return f"{folder}: no published result there yet; --partial reads what its run has finished so far"
    if _is_running(state):
        return f"{folder}: no published result there yet; {_BEGINNING.format(folder=folder)}"
    if not folder.exists():
        return f"{folder}: there is no such folder; a result lies where `output.path` of its job file says"
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
    """A result and its report as tables, for one query after the other."""

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> None:
        self._folder, self._connection = folder, connection
        self.names = tuple(names)
        self.usual = FIRST_ROWS if RESULTS in names else RUNS

    def statements(self, text: str) -> list[str]:
        """The statements of a text. Raises UsageError for what is no SQL."""
        with _explained(self._folder, self.names):
            return [str(statement.query) for statement in self._connection.extract_statements(text)]

    @contextmanager
    def answer(self, sql: str) -> Iterator[duckdb.DuckDBPyRelation]:
        """The answer to a statement while the block lasts: it is computed as it is read. A signal ends it.

        Raises UsageError for SQL that fails or would change something, StorageError, OutOfMemory; reading the answer
        raises the same.
        """
        with interruptible(self._connection), _explained(self._folder, self.names):
            yield self._connection.sql(_reading(self._connection, sql))


@contextmanager
def opened_result(folder: Path, partial: bool) -> Iterator[OpenResult]:
    """`folder` is a result's or a report's. The result is the table `results`; all others are its report's.

    Raises InputMissing, StorageError.
    """
    with _database() as (connection, spill):
        if partial:
            with interruptible(connection) as watched:
                names = _add_results(connection, [_partial(folder, spill, watched)])
        else:
            names = add_views(connection, ResultPlace.of(folder))
        yield OpenResult(folder, connection, names)


@contextmanager
def asked(folder: Path, sql: str | None, partial: bool) -> Iterator[duckdb.DuckDBPyRelation]:
    """The answer to one query, or to the usual one. Raises what `opened_result` and `OpenResult.answer` raise."""
    with (
        opened_result(folder, partial) as result,
        result.answer(result.usual if sql is None else sql) as answer,
    ):
        yield answer


@contextmanager
def opened_database() -> Iterator[tuple[duckdb.DuckDBPyConnection, Watched, Path]]:
    """A database for a user's queries, what a signal ends its queries with, and a folder for what is spilled."""
    with _database() as (connection, spill), interruptible(connection) as watched:
        yield connection, watched, spill


@contextmanager
def _database() -> Iterator[tuple[duckdb.DuckDBPyConnection, Path]]:
    with temporary_folder("query") as spill:
        config: dict[str, Any] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",  # a table's name is never a variable of this program
            "temp_directory": f"{spill}/sorting",  # and not a folder where the user stands
        }
        with duckdb.connect(config=config) as connection:
            yield connection, Path(spill)


def add_views(connection: duckdb.DuckDBPyConnection, place: ResultPlace) -> list[str]:
    """The result as `results`, and every table of its report; returns their names. Raises StorageError."""
    return _results(connection, place.results) + _reports(connection, place)


def _results(connection: duckdb.DuckDBPyConnection, results: Path | None) -> list[str]:
    found = None if results is None else published(Location.at(results))
    return [] if found is None else _add_results(connection, found.files)


def _reports(connection: duckdb.DuckDBPyConnection, place: ResultPlace) -> list[str]:
    """A table of which no run has left a file is there, and empty.

    A report is about all results of a job, of other nights and trials, too: `rows` are those of this result.
    """
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
    """One table of all runs; with the runs' rows comes what can be compared of them."""
    try:
        add_report_view(connection, name, files, where)
        if name == RUN:
            connection.execute(f'CREATE VIEW "{HISTORY}" AS {history_sql(RUN)}')
    except duckdb.Error as error:
        raise StorageError(f"{files[0].parent}: {error}; move a damaged table away") from error
    return [RUN, HISTORY] if name == RUN else [name]


def _made(place: ResultPlace) -> str:
    """The condition that a run has made this result."""
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
    """The committed answers, joined with the index that the unfinished run left or is still using.

    Written to a file first: a query may read its table more than once, a stream can be read only once.
    """
    # These take 130 ms, which a query of a published result need not
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
    """The one statement of `sql`. Raises UsageError unless it only reads."""
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
    """DuckDB's errors as ours, with what the query could have asked for."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise OutOfMemory(f"the query needs more memory than there is: {error}") from error
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) and str(folder) in str(error):
            raise StorageError(
                f"{folder}: {error}; the result was replaced or damaged meanwhile: ask again, or run "
                f"`batchinfer verify {folder}`"
            ) from error
        raise UsageError(f"DuckDB refuses the query: {error}\nTables here: {', '.join(names)}.") from error
    except RuntimeError as error:
        if "interrupted" not in str(error).lower():
            raise
        raise Interrupted(signal.SIGINT, "interrupted") from error


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the folder that it reads. `sql` None: the first rows, or the newest runs where there are no rows."""

    folder: Path
    sql: str | None = None
    partial: bool = False
    escape_formulas: bool = False  # of CSV

    def lines(self, form: str, width: int | None) -> Iterator[str]:
        """The answer for stdout. Raises what `asked` raises."""
        check_format(form, None)
        with asked(self.folder, self.sql, self.partial) as answer:
            yield from shown(answer, form, width, self.escape_formulas)

    def save(self, form: str, output: Path) -> None:
        """Write the answer to a file that is not there yet, whole or not at all. Raises OutputConflict, too."""
        form = format_for(form, output)
        check_format(form, output)
        refuse_existing(output)
        with asked(self.folder, self.sql, self.partial) as answer:
            if form != "parquet":
                lines = shown(answer, form, None, self.escape_formulas)
                write_new(output, ((line + "\n").encode() for line in lines), FileOps())
                return
            with temporary_folder("answer") as spill:
                answer.write_parquet(f"{spill}/answer.parquet", compression="zstd")
                write_new(output, _pieces(Path(spill, "answer.parquet")), FileOps())


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece
