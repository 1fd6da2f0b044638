"""A DuckDB query as input: run once, its rows kept as a Parquet file in the scratch folder."""

from __future__ import annotations

from pathlib import Path

import duckdb

from batchinfer.core.errors import BatchInferError, JobFileError, Mistake, OutOfMemory, StorageError
from batchinfer.core.wording import size
from batchinfer.filesystem.duck import interruptible
from batchinfer.input.input_file import QUERY, InputFile
from batchinfer.input.rows import first_repeated
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.memory import available_memory

_WIDE = {"HUGEINT", "UHUGEINT"}
_SHARE = 2  # half of what is available: other processes run here, too
# DuckDB reserves 32 MiB for each of the first 32 JSON files, hardly any of which it ever touches
_LEAST = 1 << 30


def default_memory() -> int:
    """Bytes that a query may take where the job does not say."""
    return max(available_memory() // _SHARE, _LEAST)


def query_columns(sql: str, job: Path) -> list[str]:
    """The names of the query's columns, without running it. Raises JobFileError with DuckDB's message."""
    config = {
        name: value for name, value in _config(job, job, default_memory()).items() if name != "temp_directory"
    }
    with duckdb.connect(config=config) as connection:
        try:
            described = _described(connection, _single_query(connection, sql, job))
        except duckdb.Error as error:
            raise _failure(error, job, job, default_memory()) from None
    return list(_distinct(described, job))


def materialise(sql: str, job: Path, target: Path, memory: int | None = None) -> InputFile:
    """Run the query and write its rows, in the query's order, to `target`.

    Relative paths in the query are looked up in the job file's folder. DuckDB may load no extension that does not
    come with it. 128-bit integers become decimal(38, 0). What needs more than `memory` bytes is spilled to disk
    next to `target`. Raises JobFileError with DuckDB's message, OutOfMemory, StorageError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    spill = target.parent / "spill"
    allowed = memory or default_memory()
    with duckdb.connect(config=_config(job, spill, allowed)) as connection, interruptible(connection):
        try:
            query = _single_query(connection, sql, job)
            columns = _distinct(_described(connection, query), job)
            connection.execute(f"COPY ({_exact(query, columns)}) TO {_quoted(target)} ({_PARQUET})")
        except duckdb.Error as error:
            raise _failure(error, job, spill, allowed) from None
    return InputFile(str(target), QUERY, "parquet", 0, 0).now()


_PARQUET = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 20480"


def _failure(error: duckdb.Error, job: Path, spill: Path, allowed: int) -> BatchInferError:
    """Return the error for a failed query. DuckDB's own advice on memory names settings that a job does not have."""
    said = str(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return OutOfMemory(
            f"{job}: input.sql needs more than the {size(allowed)} that input.sql_memory allows "
            f"({said.splitlines()[0]}); set it, e.g. input.sql_memory: {_suggested(allowed)} "
            f"({size(available_memory())} are available here), or make the query smaller: fewer columns, "
            "Parquet in place of JSON, no sort over wide rows"
        )
    if isinstance(error, duckdb.IOException) and "No space left" in said:
        return StorageError(
            f"{spill.parent}: no space left for the rows of input.sql; make room and run again"
        )
    return _mistake(job, f"DuckDB cannot run this query: {error}")


def _suggested(allowed: int) -> str:
    """Twice as much, as the job file writes it."""
    return f"{max(1, -(-2 * allowed // 2**30))}GiB"


def _config(job: Path, spill: Path, memory: int) -> dict[str, str | bool | int | float | list[str]]:
    return {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "file_search_path": str(job.parent.absolute()),
        "temp_directory": str(spill),
        "memory_limit": f"{memory}B",
        "threads": usable_cpus(),
        "python_enable_replacements": False,  # a table's name is never a variable of this program
        "preserve_insertion_order": True,
    }


def _single_query(connection: duckdb.DuckDBPyConnection, sql: str, job: Path) -> str:
    """The one SELECT that the text holds, without what follows it: a semicolon, comments."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise _mistake(job, f"one SELECT is needed; found {len(statements)} statement(s), or something else")
    text = statements[0].query.encode()
    end = len(text)
    for at, kind in reversed(duckdb.tokenize(text.decode())):  # places count bytes
        if kind != duckdb.token_type.comment and text[at : at + 1] != b";":
            break
        end = at
    return text[:end].decode() + "\n"  # which ends a comment within


def _described(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, str]]:
    """Names and types of a query's columns."""
    return [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {query}").fetchall()]


def _distinct(columns: list[tuple[str, str]], job: Path) -> dict[str, str]:
    """Types by name. DuckDB does not tell names apart by case, and would rename the second of two that are alike."""
    twice = first_repeated(name.lower() for name, _ in columns)
    if twice is not None:
        alike = [name for name, _ in columns if name.lower() == twice]
        raise _mistake(
            job,
            f"two columns have one name: {alike[0]!r} and {alike[1]!r}; give each its own: select … as other_name",
        )
    return dict(columns)


def _exact(query: str, columns: dict[str, str]) -> str:
    """Parquet has no 128-bit integer and DuckDB would write it as a float."""
    wide = [name for name, kind in columns.items() if kind in _WIDE]
    if not wide:
        return query
    casts = ", ".join(f"CAST({_name(n)} AS DECIMAL(38, 0)) AS {_name(n)}" for n in wide)
    return f"SELECT * REPLACE ({casts}) FROM ({query})"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _mistake(job: Path, message: str) -> JobFileError:
    return JobFileError(str(job), [Mistake("input.sql", message)])
