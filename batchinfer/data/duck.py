"""DuckDB as a bounded tool: a memory limit, a place to spill, no extensions fetched, errors with our
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.data.durable import storage
from batchinfer.errors import OutOfMemory, StorageError


@contextmanager
def connection(spill: Path, memory_limit: str = "1GiB", threads: int = 2) -> Iterator[Any]:
    """An in-memory database that spills to the folder `spill`. Raises StorageError, OutOfMemory."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory_limit,
        "threads": str(threads),
        "temp_directory": str(spill),
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
    }
    with storage(spill.parent, "create"):
        spill.parent.mkdir(parents=True, exist_ok=True)  # DuckDB makes and removes the last one itself
    with naming_errors(spill), duckdb.connect(config=settings) as database:
        yield database


@contextmanager
def naming_errors(place: Path) -> Iterator[None]:
    """Turn DuckDB's I/O and memory errors into StorageError and OutOfMemory."""
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException) as error:  # the second: a damaged Parquet file
        raise StorageError(f"{place}: {error}; `--verify` finds and drops damaged parts") from error
    except duckdb.OutOfMemoryException as error:
        raise OutOfMemory(f"{place}: {error}; give more memory, or free disk space to spill to") from error


def parquet(paths: Sequence[Path], options: str = "") -> str:
    """The SQL table function that reads these files, in this order.

    Names are escaped: unescaped, `a[1]/x.parquet` reads `a1/x.parquet` where that exists.
    """
    return f"read_parquet([{', '.join(literal(escape(str(path))) for path in paths)}]{options})"


def literal(value: object) -> str:
    """A SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"
