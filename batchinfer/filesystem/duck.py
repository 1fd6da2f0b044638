"""DuckDB as a bounded tool: a memory limit, a place to spill, no extensions fetched, errors with our
names.
"""

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

# Joins and sorts of our own spill what is larger: of 10 million rows too, which 1 GiB keeps below 2 GiB in all.
_MOST = 1 << 30
_LEAST = 128 << 20  # DuckDB holds some blocks of each thread at least
_OF_THREAD = 128 << 20  # as DuckDB's manual advises; two threads work with less
_SHARE = 4
_AGAIN_S = 0.1

Watched = Callable[[Any], AbstractContextManager[Any]]  # a block in which a signal ends what a database runs


def working_memory() -> int:
    """Bytes for a join or sort: a quarter of what is available, from 128 MiB to 1 GiB."""
    return min(max(available_memory() // _SHARE, _LEAST), _MOST)


@contextmanager
def connection(
    spill: Path, memory_limit: str | None = None, threads: int = 2, watched: Watched = nullcontext
) -> Iterator[Any]:
    """An in-memory database that spills to the folder `spill`. Raises StorageError, OutOfMemory.

    `memory_limit` as DuckDB writes it, e.g. 1GiB; None: what `working_memory` finds. Of `threads` no more are used than
    have memory to work in. `watched` is that of a user's query which this work is a part of.
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
        spill.parent.mkdir(parents=True, exist_ok=True)  # DuckDB makes and removes the last one itself
    with naming_errors(spill), _opened(settings) as database, watched(database):
        yield database


def _opened(settings: dict[str, str]) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
    return duckdb.connect(config={**settings})


@contextmanager
def interruptible(database: duckdb.DuckDBPyConnection) -> Iterator[Watched]:
    """Within this block a signal ends the query that `database` runs, so that its Python handler is called.

    The block gets what does the same for another database while a block of its own lasts. DuckDB itself looks for
    signals between its tasks, and one task of a large join may take hours. For users' queries: not where signals are
    deferred, because the query ends all the same.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are none of its business
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
    """The databases whose queries a signal ends."""

    def __init__(self) -> None:
        self._databases: list[duckdb.DuckDBPyConnection] = []
        self._lock = threading.Lock()  # none is closed while it is interrupted

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
    """Again and again once a byte has come, because it may come just before a query; until the pipe is closed."""
    signalled = False
    while True:
        if select.select([heard], [], [], _AGAIN_S if signalled else None)[0]:
            signalled = True
            if not os.read(heard, 64):
                return
        running.interrupt()


@contextmanager
def naming_errors(place: Path) -> Iterator[None]:
    """Turn DuckDB's I/O and memory errors into StorageError and OutOfMemory."""
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException) as error:  # the second: a damaged Parquet file
        raise StorageError(f"{place}: {error}; `--verify` finds and drops damaged parts") from error
    except duckdb.OutOfMemoryException as error:
        raise OutOfMemory(
            f"{place}: {str(error).splitlines()[0]}; a quarter of the memory that is available, at most 1 GiB, is "
            "used here and the rest is spilled to this folder: end other programs or make room on its disk, then run "
            "the same command again"
        ) from error


def parquet(paths: Sequence[Path], options: str = "") -> str:
    """The SQL table function that reads these files, in this order.

    Raises StorageError for a path that is not UTF-8.
    Names are escaped: unescaped, `a[1]/x.parquet` reads `a1/x.parquet` where that exists.
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
    """A SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"
