"""A DuckDB query as input. It runs once, and its rows are stored as a Parquet file in the scratch folder."""

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
_SHARE = 2  # a query may use 1/_SHARE of the available memory, since other processes run on the machine
# Minimum memory limit in bytes: DuckDB reserves 32 MiB for each of the first 32 JSON files, though it uses little of it
_LEAST = 1 << 30


def default_memory() -> int:
    """Return the default memory limit of an SQL query in bytes: half of the available memory."""
    return max(available_memory() // _SHARE, _LEAST)


def query_columns(sql: str, job: Path) -> list[str]:
    """Return the column names of an SQL query without running the query.

    Args:
        sql: The query.
        job: The job file. Relative paths in the query are relative to its folder.

    Raises:
        JobFileError: DuckDB rejects the query; the message is DuckDB's.
    """
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
    """Run an SQL query, write its rows in their order to a Parquet file, and return that file.

    The query can only use extensions that come with DuckDB. 128-bit integers are written as decimal(38, 0).

    Args:
        sql: The query.
        job: The job file. Relative paths in the query are relative to its folder.
        target: The file to write. Data that does not fit in memory is spilled to a folder next to it.
        memory: The memory limit in bytes, or None for the default.

    Raises:
        JobFileError: DuckDB rejects the query; the message is DuckDB's.
        OutOfMemory: The query needs more than `memory`.
        StorageError: The disk is full.
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
    # DuckDB's advice on memory is left out: a job cannot set DuckDB's settings
    message = str(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return OutOfMemory(
            f"{job}: input.sql needs more than the {size(allowed)} that input.sql_memory allows "
            f"({message.splitlines()[0]}); set it, e.g. input.sql_memory: {_suggested(allowed)} "
            f"({size(available_memory())} are available here), or make the query smaller: fewer columns, "
            "Parquet in place of JSON, no sort over wide rows"
        )
    if isinstance(error, duckdb.IOException) and "No space left" in message:
        return StorageError(
            f"{spill.parent}: no space left for the rows of input.sql; make room and run again"
        )
    return _mistake(job, f"DuckDB cannot run this query: {error}")


def _suggested(allowed: int) -> str:
    """Return twice a memory limit (bytes) in the notation of the job file, such as "4GiB", as advice to the user."""
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
        "python_enable_replacements": False,  # table names must not resolve to Python variables
        "preserve_insertion_order": True,
    }


def _single_query(connection: duckdb.DuckDBPyConnection, sql: str, job: Path) -> str:
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise _mistake(job, f"one SELECT is needed; found {len(statements)} statement(s), or something else")
    text = statements[0].query.encode()
    end = len(text)
    for at, kind in reversed(duckdb.tokenize(text.decode())):  # positions are in bytes
        if kind != duckdb.token_type.comment and text[at : at + 1] != b";":
            break
        end = at
    return text[:end].decode() + "\n"  # the newline ends a comment on the last line


def _described(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {query}").fetchall()]


def _distinct(columns: list[tuple[str, str]], job: Path) -> dict[str, str]:
    twice = first_repeated(name.lower() for name, _ in columns)
    if twice is not None:
        alike = [name for name, _ in columns if name.lower() == twice]
        raise _mistake(
            job,
            f"two columns have one name: {alike[0]!r} and {alike[1]!r}; give each its own: select … as other_name",
        )
    return dict(columns)


def _exact(query: str, columns: dict[str, str]) -> str:
    # DuckDB would write 128-bit integers to Parquet as floats, so they are cast to decimals
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
