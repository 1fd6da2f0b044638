"""A Parquet file that is written as rows arrive, and exists only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TEMPORARY = ".tmp"  # suffix: no `*.parquet` glob matches it
# Rows kept in memory as Python tuples: 16,384 steps of 20 values are about 12 MiB, and row groups of that
# size cost DuckDB nothing measurable to read.
BUFFER_ROWS = 16_384


class Spool:
    """Rows of one table on their way to `path`; at most `buffer_rows` of them are in memory.

    `finish` makes the file appear under its name, `abort` leaves nothing. As a context manager it aborts
    what was not finished.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        buffer_rows: int = BUFFER_ROWS,
        given: Sequence[str] | None = None,
        dictionary: bool | list[str] = True,
    ) -> None:
        """`given`: the columns in the order in which rows give them, if that is not the schema's.

        `dictionary`: columns of which Parquet tries to store each value once.
        """
        self.path = path
        self.rows = 0
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._schema = schema
        self._given = schema.names if given is None else given
        self._limit = buffer_rows
        self._buffer: list[tuple[Any, ...]] = []
        with naming(path):
            # Arrow would create it with 0666, which an umask of 0 leaves as it is
            os.close(os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
            self._writer: pq.ParquetWriter | None = pq.ParquetWriter(
                self._temporary, schema, compression="zstd", use_dictionary=dictionary
            )

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def append(self, row: tuple[Any, ...]) -> None:
        """Take one row, its values in the order of `given`."""
        self._buffer.append(row)
        self.rows += 1
        if len(self._buffer) >= self._limit:
            self._flush()

    def write(self, table: pa.Table) -> None:
        """Take many rows at once, whose columns are the schema's."""
        self._flush()
        with naming(self.path):
            self._open_writer().write_table(table)
        self.rows += table.num_rows

    def finish(self) -> Path:
        """Write what is left, sync and rename; returns the path. Raises OSError when the disk fails."""
        sync_and_rename(self.close(), self.path)
        return self.path

    def close(self) -> Path:
        """Write what is left; returns the file's temporary name, which stays. Raises OSError when the disk fails."""
        self._flush()
        with naming(self.path):
            self._open_writer().close()
        self._writer = None
        return self._temporary

    def _open_writer(self) -> pq.ParquetWriter:
        if self._writer is None:
            raise ValueError(f"{self.path} was finished or aborted before")
        return self._writer

    def abort(self) -> None:
        """Drop an unfinished file; nothing happens after `finish`."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._buffer or self._writer is None:
            return
        values = dict(zip(self._given, zip(*self._buffer, strict=True), strict=True))
        columns = [pa.array(values[field.name], field.type) for field in self._schema]
        self._buffer = []
        with naming(self.path):
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def write_row(path: Path, schema: pa.Schema, row: Mapping[str, Any]) -> Path:
    """A table of one row, whole or not at all. Raises ValueError unless the row names exactly the columns."""
    wrong = set(row) ^ set(schema.names)
    if wrong:
        raise ValueError(f"the row and the columns differ in {sorted(wrong)}")
    with Spool(path, schema) as spool:
        spool.append(tuple(_cell(row[name]) for name in schema.names))
        return spool.finish()


def _cell(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value


def sync_and_rename(temporary: Path, final: Path) -> None:
    """Make a written file durable under its final name: fsync, rename, fsync of the folder."""
    with naming(final):
        _sync(temporary, os.O_RDWR)
        os.replace(temporary, final)
        _sync(final.parent, os.O_RDONLY)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError name the file that was to be written: those of pyarrow and of an fsync name none."""
    try:
        yield
    except OSError as error:
        if str(path) in str(error):
            raise
        told = " ".join(str(error).split()) if error.errno is None else os.strerror(error.errno)
        raise OSError(error.errno or 0, f"cannot be written: {told}", str(path)) from error


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
