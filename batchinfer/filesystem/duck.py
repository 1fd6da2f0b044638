"""DuckDB with a memory limit, a folder for spilling, no downloads of extensions, and batchinfer's exceptions."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from glob import escape
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.core.errors import OutOfMemory, StorageError
from batchinfer.filesystem.durable import storage
from batchinfer.job.file import not_utf8
from batchinfer.machine.memory import available_memory

# Maximum memory of joins and sorts. With it, 10 million rows stay below 2 GiB in total
_MOST = 1 << 30
_LEAST = 128 << 20  # minimum memory: DuckDB needs some blocks per thread
_OF_THREAD = 128 << 20  # memory per thread that DuckDB's manual recommends; two threads work with less
_SHARE = 4  # a quarter of the available memory is used
_AGAIN_S = 0.1  # seconds between interrupts after a signal

# Returns a context manager in which a signal interrupts the queries of a database
Watched = Callable[[Any], AbstractContextManager[Any]]


def working_memory() -> int:
    """Return the maximum bytes for a DuckDB join or sort: 1/4 of the free memory, from 128 MiB to 1 GiB."""
    return min(max(available_memory() // _SHARE, _LEAST), _MOST)


@contextmanager
def connection(
    spill: Path, memory_limit: str | None = None, threads: int = 2, watched: Watched = nullcontext
) -> Iterator[Any]:
    """Open an in-memory DuckDB database that spills to the folder `spill`.

    Args:
        spill: The folder. DuckDB creates and removes it.
        memory_limit: In DuckDB's format, such as 1GiB. None: `working_memory`.
        threads: Maximum threads. Fewer are used if memory is low.
        watched: The function that `interruptible` yields, so that signals interrupt the queries of this
            database. By default, queries are not interrupted.

    Raises:
        StorageError: The folder cannot be written, or a file cannot be read.
        OutOfMemory: The memory limit was exceeded.
    """
    memory = working_memory()
    settings = {
        "memory_limit": memory_limit or f"{memory}B",
        "threads": str(min(threads, max(2, memory // _OF_THREAD))),
        "temp_directory": str(spill),
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
    }
    _check_path(spill)
    with storage(spill.parent, "create"):
        spill.parent.mkdir(parents=True, exist_ok=True)  # DuckDB creates and removes the last folder itself
    with translate_errors(spill), _connect(settings) as database, watched(database):
        yield database


def _connect(settings: dict[str, str]) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
    return duckdb.connect(config={**settings})


@contextmanager
def interruptible(database: duckdb.DuckDBPyConnection) -> Iterator[Watched]:
    """Let signals, such as Ctrl-C, interrupt the queries of a DuckDB database while the block runs.

    DuckDB itself only checks for signals between its tasks, which may take hours. Do not use this where
    signals are deferred: the signal would end the query at once.

    Yields:
        A function that returns the same kind of context manager for another database.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield nullcontext
        return
    running = _Running()
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    before = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_interrupt_when, args=(heard, running), daemon=True, name="signals")
    watcher.start()
    try:
        with running.watched(database):
            yield running.watched
    finally:
        signal.set_wakeup_fd(before)
        os.close(bell)
        watcher.join()
        os.close(heard)


class _Running:
    """The DuckDB databases whose queries a signal interrupts."""

    def __init__(self) -> None:
        self._databases: list[duckdb.DuckDBPyConnection] = []
        self._lock = threading.Lock()  # prevents closing a database while it is interrupted

    @contextmanager
    def watched(self, database: duckdb.DuckDBPyConnection) -> Iterator[None]:
        with self._lock:
            self._databases.append(database)
        try:
            yield
        finally:
            with self._lock:
                self._databases.remove(database)

    def interrupt(self) -> None:
        with self._lock:
            for database in self._databases:
                database.interrupt()


def _interrupt_when(heard: int, running: _Running) -> None:
    # A signal is followed by repeated interrupts: a single one may come just before a query starts
    signalled = False
    while True:
        if select.select([heard], [], [], _AGAIN_S if signalled else None)[0]:
            signalled = True
            if not os.read(heard, 64):
                return
        running.interrupt()


@contextmanager
def translate_errors(place: Path) -> Iterator[None]:
    """Convert DuckDB's errors of disk or memory in the block to StorageError and OutOfMemory.

    Args:
        place: The path at the start of the message.
    """
    try:
        yield
    except (
        duckdb.IOException,
        duckdb.InvalidInputException,
    ) as error:  # InvalidInput: a damaged Parquet file
        raise StorageError(f"{place}: {error}; `--verify` finds and drops damaged parts") from error
    except duckdb.OutOfMemoryException as error:
        raise OutOfMemory(
            f"{place}: {str(error).splitlines()[0]}; a quarter of the memory that is available, at most 1 GiB, is "
            "used here and the rest is spilled to this folder: end other programs or make room on its disk, then run "
            "the same command again"
        ) from error


def parquet(paths: Sequence[Path], options: str = "") -> str:
    """Return the SQL table function that reads these Parquet files in this order.

    Special characters in names are escaped: otherwise `a[1]/x.parquet` would also match `a1/x.parquet`.

    Args:
        paths: The files.
        options: Further arguments of `read_parquet`, such as ", union_by_name=true".

    Raises:
        StorageError: A path is not UTF-8.
    """
    for path in paths:
        _check_path(path)
    return f"read_parquet([{', '.join(literal(escape(str(path))) for path in paths)}]{options})"


def _check_path(path: Path) -> None:
    if (shown := not_utf8(path)) is not None:
        raise StorageError(
            f"{shown}: the path holds bytes that are not UTF-8, which DuckDB cannot open; rename it"
        )


def literal(value: object) -> str:
    """Return a value as a SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"
