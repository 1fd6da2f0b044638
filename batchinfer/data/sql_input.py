"""A DuckDB query as input: run once, its rows kept as a Parquet file in the scratch folder."""

from __future__ import annotations

from pathlib import Path

import duckdb

from batchinfer.data.files import InputFile
from batchinfer.errors import JobFileError, Mistake

_WIDE = {"HUGEINT", "UHUGEINT"}


def materialise(sql: str, job: Path, target: Path) -> InputFile:
    """Run the query and write its rows, in the query's order, to `target`.

    Relative paths in the query are looked up in the job file's folder. DuckDB may load no extension that does not
    come with it. 128-bit integers become decimal(38, 0). Raises JobFileError with DuckDB's message.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    spill = target.parent / "spill"
    with duckdb.connect(config=_config(job, spill)) as connection:
        try:
            _check_single_query(connection, sql, job)
            connection.execute(f"COPY ({_exact(connection, _bare(sql))}) TO {_quoted(target)} ({_PARQUET})")
        except duckdb.Error as error:
            raise _mistake(job, f"DuckDB cannot run this query: {error}") from None
    found = target.stat()
    return InputFile(str(target), "sql", "parquet", found.st_size, found.st_mtime_ns)


_PARQUET = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 20480"


def _config(job: Path, spill: Path) -> dict[str, str | bool | int | float | list[str]]:
    return {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "file_search_path": str(job.parent.absolute()),
        "temp_directory": str(spill),
        "memory_limit": "600MB",  # what leaves room for the rest within 1.5 GB; more is spilled to disk
        "preserve_insertion_order": True,
    }


def _check_single_query(connection: duckdb.DuckDBPyConnection, sql: str, job: Path) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise _mistake(job, f"one SELECT is needed; found {len(statements)} statement(s), or something else")


def _exact(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """Parquet has no 128-bit integer and DuckDB would write it as a float."""
    described = connection.execute(f"DESCRIBE {query}").fetchall()
    wide = [name for name, kind, *_ in described if kind in _WIDE]
    if not wide:
        return query
    casts = ", ".join(f"CAST({_name(n)} AS DECIMAL(38, 0)) AS {_name(n)}" for n in wide)
    return f"SELECT * REPLACE ({casts}) FROM ({query})"


def _bare(sql: str) -> str:
    # The newline ends a trailing comment.
    return sql.strip().rstrip(";") + "\n"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _mistake(job: Path, message: str) -> JobFileError:
    return JobFileError(str(job), [Mistake("input.sql", message)])
