"""Chunks: consecutive rows of a file. Cutting a chunk is cheap; another process usually parses its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.input.rows import Values


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """The maximum size of a chunk of a text file (JSON lines or CSV). A chunk has whole lines, and at least one.

    Parsing and rendering a chunk should take much longer than passing it to another process (256 KiB of JSON lines of
    300 bytes: 40 ms and 0.3 ms), and should be short compared with a job. `lines` bounds the number of prompts where
    lines are short and the template is long.
    """

    bytes: int = 1 << 18
    lines: int = 1024


DEFAULT_SIZE = ChunkSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChunk(ABC):
    """Consecutive rows of one input file.

    Args:
        file: The file's name in the results.
        bytes_read: The position of the reader after this chunk, in bytes on disk; of the file, or of all files if a
            `Reader` made the chunk.
        most_rows: An upper bound on the number of rows.
        data: The large part of the chunk. It is sent to other processes separately.
        first_row: The number of the first row in the file, or None if it is unknown because blank lines are not
            counted as rows.
        table: The rows of a typed format. It stays in the process that cut the chunk.
    """

    file: str
    bytes_read: int
    most_rows: int
    data: bytes = b""
    first_row: int | None = None
    table: pa.RecordBatch | None = None

    @abstractmethod
    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Yield the rows from `start` to `stop`; an invalid row is yielded as a RowError.

        Args:
            start: The first row, counted from the start of the chunk.
            stop: The row after the last one, or None for all rows.
            values: The columns to read, or None for all. A format that supports it only validates the other columns.
        """

    def pack(self) -> tuple[Self, bytes]:
        """Return the chunk without its large data, and the data, to send both to another process."""
        return replace(self, data=b""), self.data

    def unpack(self, data: bytes) -> Self:
        """Return the chunk with its data, on the process that received both."""
        return replace(self, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(InputChunk):
    """A chunk whose rows are already parsed."""

    first_row: int
    rows: list[Values | RowError]

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Yield the rows from `start` to `stop` with all columns."""
        return islice(self.rows, start, stop)

    def pack(self) -> tuple[Self, bytes]:
        """Return the batch without its table, and no data. Its rows are pickled."""
        return replace(self, table=None), b""

    def slice(self, start: int, stop: int) -> Self:
        """Return the rows from `start` to `stop` as a batch."""
        rows = self.rows[start:stop]
        table = None if self.table is None else self.table.slice(start, len(rows))
        return replace(self, rows=rows, most_rows=len(rows), first_row=self.first_row + start, table=table)


def read_batch(chunk: InputChunk, first_row: int, most: int | None = None) -> RowBatch:
    """Parse a chunk.

    Args:
        chunk: The chunk to parse.
        first_row: The number of the chunk's first row in its file.
        most: The maximum number of rows, or None for all.
    """
    rows = list(chunk.read(0, most))
    table = None if chunk.table is None else chunk.table.slice(0, len(rows))
    return RowBatch(
        file=chunk.file,
        bytes_read=chunk.bytes_read,
        most_rows=len(rows),
        first_row=first_row,
        table=table,
        rows=rows,
    )
