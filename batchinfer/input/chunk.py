"""Chunks: consecutive rows of a file. Finding the ends of a chunk is cheap; another process usually parses its rows."""

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
    """The maximum size of a chunk of a text file (JSON lines or CSV). One process parses a chunk at a time.

    A chunk has whole lines: at least one line, even if that line exceeds the size.

    Attributes:
        bytes: The maximum number of bytes.
        lines: The maximum number of lines. It limits the size of the prompts if the job's template is long.
    """

    # 256 KiB of JSON lines of 300 bytes take 40 ms to parse and render, and 0.3 ms to send to another process
    bytes: int = 1 << 18
    lines: int = 1024


DEFAULT_SIZE = ChunkSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChunk(ABC):
    """Consecutive rows of one input file. Subclasses parse them.

    Args:
        file: The file's name in the results.
        bytes_read: The number of bytes on disk from the start of the file to the end of this chunk. If a `Reader` made
            the chunk, it includes the sizes of all files before this one.
        most_rows: An upper bound on the number of rows.
        data: The unparsed rows of a text file. Empty for other formats.
        first_row: The number of the first row in the file, from 0. None if it is unknown, because blank lines do not
            count as rows.
        table: The rows of a typed format (Parquet, Arrow). None for other formats.
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
        """Parse and yield the rows from `start` to before `stop`, as values by column, or as a RowError if invalid.

        Args:
            start: The first row, counted from the start of the chunk.
            stop: The row after the last one, or None for all rows.
            values: The names of the columns to return, or None for all. A format may return all columns anyway.
        """

    def serialize(self) -> tuple[Self, bytes]:
        """Return a copy of the chunk without its large data, and the data. Both are sent to another process."""
        return replace(self, data=b""), self.data

    def deserialize(self, data: bytes) -> Self:
        """Return a copy of the chunk with the data that `serialize` removed. The receiving process calls this."""
        return replace(self, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(InputChunk):
    """A chunk whose rows are already parsed.

    Args:
        first_row: The number of the first row in its file, from 0.
        rows: Per row, its values by column, or the error of an invalid row.
    """

    first_row: int
    rows: list[Values | RowError]

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Yield the parsed rows from `start` to before `stop`. They have all columns: `values` is ignored."""
        return islice(self.rows, start, stop)

    def serialize(self) -> tuple[Self, bytes]:
        """Return a copy of the batch without its Arrow table, and empty bytes: the parsed rows stay in the copy."""
        return replace(self, table=None), b""

    def slice(self, start: int, stop: int) -> Self:
        """Return a smaller batch: the rows from `start` to before `stop`, counted from the start of this batch."""
        rows = self.rows[start:stop]
        table = None if self.table is None else self.table.slice(start, len(rows))
        return replace(self, rows=rows, most_rows=len(rows), first_row=self.first_row + start, table=table)


def read_batch(chunk: InputChunk, first_row: int, most: int | None = None) -> RowBatch:
    """Parse the rows of a chunk and return them as a batch.

    Args:
        chunk: The chunk to parse.
        first_row: The number of the chunk's first row in its file, from 0.
        most: The maximum number of rows to parse, or None for all.
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
