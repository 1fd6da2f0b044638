"""Writes a Parquet file row by row under a temporary name, and renames it when it is complete."""

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
# Rows in memory as Python tuples, and rows per row group: 16,384 steps of 20 values take about 12 MiB
BUFFER_ROWS = 16_384


class Spool:
    """Writes a report table, row by row, to a Parquet file with a temporary name.

    `finish` renames the file to its final name, and `abort` deletes it. A context manager, which deletes an
    unfinished file.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        buffer_rows: int = BUFFER_ROWS,
        given: Sequence[str] | None = None,
        dictionary: bool | list[str] = True,
    ) -> None:
        """Create the temporary file of a report table.

        Args:
            path: The final path.
            schema: The columns of the file.
            buffer_rows: Maximum rows in memory before they are written.
            given: The columns in the order in which `append` gets their values. None: as in `schema`.
            dictionary: Columns to dictionary-encode, or True for all.
        """
        self.path = path
        self.rows = 0
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._schema = schema
        self._given = schema.names if given is None else given
        self._limit = buffer_rows
        self._buffer: list[tuple[Any, ...]] = []
        with name_file_in_errors(path):
            # created here, because Arrow would use mode 0666, which an umask of 0 does not restrict
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
        """Append a row to the table. It is written when enough rows have been appended.

        Args:
            row: A value per column, in the order of the constructor's `given`.
        """
        self._buffer.append(row)
        self.rows += 1
        if len(self._buffer) >= self._limit:
            self._flush()

    def write(self, table: pa.Table) -> None:
        """Append all rows of an Arrow table, which must have the columns of the file's schema."""
        self._flush()
        with name_file_in_errors(self.path):
            self._open_writer().write_table(table)
        self.rows += table.num_rows

    def finish(self) -> Path:
        """Write buffered rows, sync and rename the file, and return its final path.

        Raises:
            OSError: The disk fails.
        """
        sync_and_rename(self.close(), self.path)
        return self.path

    def close(self) -> Path:
        """Write buffered rows, complete the file, and return its temporary path. It is not renamed.

        Raises:
            OSError: The disk fails.
        """
        self._flush()
        with name_file_in_errors(self.path):
            self._open_writer().close()
        self._writer = None
        return self._temporary

    def _open_writer(self) -> pq.ParquetWriter:
        if self._writer is None:
            raise ValueError(f"{self.path} was finished or aborted before")
        return self._writer

    def abort(self) -> None:
        """Delete the unfinished file. Does nothing after `finish`."""
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
        with name_file_in_errors(self.path):
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def write_row(path: Path, schema: pa.Schema, row: Mapping[str, Any]) -> Path:
    """Write a table of one row to a Parquet file atomically, and return its path.

    Raises:
        ValueError: The keys of the row are not exactly the columns.
        OSError: The disk fails.
    """
    wrong = set(row) ^ set(schema.names)
    if wrong:
        raise ValueError(f"the row and the columns differ in {sorted(wrong)}")
    with Spool(path, schema) as spool:
        spool.append(tuple(_cell(row[name]) for name in schema.names))
        return spool.finish()


def _cell(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value


def sync_and_rename(temporary: Path, final: Path) -> None:
    """Rename a file durably: fsync the file, rename it, and fsync its folder."""
    with name_file_in_errors(final):
        _sync(temporary, os.O_RDWR)
        os.replace(temporary, final)
        _sync(final.parent, os.O_RDONLY)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block, because errors of pyarrow and fsync do not name the file."""
    try:
        yield
    except OSError as error:
        if str(path) in str(error):
            raise
        reason = " ".join(str(error).split()) if error.errno is None else os.strerror(error.errno)
        raise OSError(error.errno or 0, f"cannot be written: {reason}", str(path)) from error


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
