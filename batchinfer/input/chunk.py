"""Chunks: consecutive rows as they are cut out of a file. Cutting is cheap; reading the rows is left to whoever wants
them, mostly to another process."""

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
    """How much of a file of lines becomes one chunk: whole lines only, but at least one.

    What a worker takes for a chunk is long against the time in which it is handed over (256 KiB of JSON lines of 300
    bytes: 40 ms against 0.3 ms), and short against a job. With the lines bounded, so are the prompts that are made of
    short lines and a long template.
    """

    bytes: int = 1 << 18
    lines: int = 1024


DEFAULT_SIZE = ChunkSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChunk(ABC):
    """Consecutive rows of the file named `file`. `data` is what is large in it: it travels apart from the rest.

    `first_row` is None where blank lines make it known only once the rows before are counted. `table` holds the rows
    where the format has types; it stays with the process that cut it. `bytes_read` is how far the reading got, in
    bytes as they lie on disk: of this file, or from a Reader of all.
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
        """Yield the rows from `start` to `stop`, a bad one as a RowError. Where the format allows it, only the columns
        in `values` have values, and the others are merely checked; None: all have."""

    def packed(self) -> tuple[Self, bytes]:
        """Return this chunk for another process: without what is large, and that."""
        return replace(self, data=b""), self.data

    def unpacked(self, data: bytes) -> Self:
        """Return the chunk that was packed."""
        return replace(self, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(InputChunk):
    """Rows that were read already."""

    first_row: int
    rows: list[Values | RowError]

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        return islice(self.rows, start, stop)

    def packed(self) -> tuple[Self, bytes]:
        return replace(self, table=None), b""

    def sliced(self, start: int, stop: int) -> Self:
        """Return some of its rows."""
        rows = self.rows[start:stop]
        table = None if self.table is None else self.table.slice(start, len(rows))
        return replace(self, rows=rows, most_rows=len(rows), first_row=self.first_row + start, table=table)


def read_batch(chunk: InputChunk, first_row: int, most: int | None = None) -> RowBatch:
    """Return the rows of a chunk, at most so many. `first_row` is the number of its first one in its file."""
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
