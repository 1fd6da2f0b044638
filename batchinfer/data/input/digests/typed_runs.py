"""Runs of the rows of a table with types (Parquet, Arrow)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.data.input.digests.row_digest import row_digests
from batchinfer.data.input.digests.runs import Numbers, OpenedRuns, run_digests, run_ends, weights
from batchinfer.data.input.rows import Values

Bytes = NDArray[np.uint8]
Read = Callable[[pa.RecordBatch], Sequence[Values | RowError]]


@dataclass(frozen=True, slots=True)
class _ColumnBytes:
    """The bytes that a column's values are made of: those of row i end at `ends[i]`, where those of the next one begin,
    and the first ones begin at `start`. `sizes` are marks of nulls, and the lengths of texts."""

    data: Any
    start: int
    ends: Numbers
    sizes: tuple[NDArray[Any], ...]

    def weights(self) -> NDArray[np.uint32]:
        """Return a number for each row, that follows from its value."""
        starts = np.concatenate([np.full(1, self.start, np.int64), self.ends])[:-1]
        return weights(memoryview(self.data)[: int(self.ends[-1])], starts)

    def pieces(self, first: int, stop: int) -> Iterator[Any]:
        """Yield the bytes of some rows."""
        for sizes in self.sizes:
            yield sizes[first:stop]
        start = self.start if not first else int(self.ends[first - 1])
        yield memoryview(self.data)[start : int(self.ends[stop - 1])]


class TypedRuns:
    """The runs of a table, all of whose columns have types that `column_bytes` knows."""

    def __init__(self, table: pa.RecordBatch, columns: Sequence[_ColumnBytes], read: Read) -> None:
        """`columns`: those that are read. `read`: reads rows."""
        self._table, self._read = table, read
        rows = np.zeros(table.num_rows, np.uint32)
        for number, column in enumerate(columns):
            rows += column.weights() * np.uint32(2 * number + 1)
        self._ends = run_ends(rows)
        self._starts = np.concatenate([np.zeros(1, np.int64), self._ends])[:-1]
        schema = [(table.schema.names[at], str(kind)) for at, kind in enumerate(table.schema.types)]
        self.digests = run_digests(self._pieces(columns), ("typed", schema))

    def _pieces(self, columns: Sequence[_ColumnBytes]) -> Iterator[Iterator[Any]]:
        for first, stop in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            size = np.array([stop - first], "<i8")
            yield (
                piece
                for pieces in ([size], *(one.pieces(first, stop) for one in columns))
                for piece in pieces
            )

    def opened(self, which: Numbers) -> OpenedRuns:
        """Read the rows of these runs."""
        sizes = self._ends[which] - self._starts[which]
        begins = np.cumsum(sizes) - sizes
        rows = np.arange(int(sizes.sum())) + np.repeat(self._starts[which] - begins, sizes)
        whole = len(rows) == self._table.num_rows
        found = self._read(self._table if whole else self._table.take(pa.array(rows)))
        return OpenedRuns(found, sizes, typed_digests(found))


def typed_runs(table: pa.RecordBatch, values: Collection[str] | None, read: Read) -> TypedRuns | None:
    """Return the runs of a table of which these columns are read; None: all. None where one of them has a type whose
    bytes are not known here, or where it is not sure that the others are sound."""
    if not table.num_rows:
        return None
    wanted = [name for name in table.schema.names if values is None or name in values]
    columns = [column_bytes(table.column(name)) for name in wanted]
    known = [one for one in columns if one is not None]
    if not known or len(known) < len(columns):
        return None
    try:
        for name in table.schema.names:
            if name not in wanted:
                table.column(name).validate(full=True)
    except pa.ArrowInvalid:
        return None
    return TypedRuns(table.select(wanted) if len(wanted) < table.num_columns else table, known, read)


def typed_digests(rows: Sequence[Values | RowError]) -> bytes:
    """Return the digests of rows of a table, as row_digests has them."""
    return row_digests(map(_as_bytes, rows), "typed")


def _as_bytes(row: Values | RowError) -> bytes | None:
    """Return the row as Python writes it, to the bit: this is all that is read of it."""
    return None if isinstance(row, RowError) else repr(row).encode("utf-8", "surrogatepass")


def column_bytes(column: pa.Array) -> _ColumnBytes | None:
    """Return what a column's values are made of; None for types that are no texts, bytes, numbers, truth values or
    times."""
    kind = column.type
    nulls = np.asarray(column.is_null().cast(pa.uint8()))
    if kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        return _text_bytes(column, nulls)
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.uint8()), pa.uint8()
    if not pa.types.is_primitive(kind):
        return None
    width = kind.bit_width // 8
    values = np.frombuffer(column.buffers()[1], np.uint8)
    values = values[width * column.offset : width * (column.offset + len(column))]
    if nulls.any():  # what stands at a null is not read
        values = (values.reshape(-1, width) * (nulls == 0)[:, None]).reshape(-1)
    return _ColumnBytes(values, 0, np.arange(1, len(column) + 1) * width, (nulls,))


def _text_bytes(column: pa.Array, nulls: Bytes) -> _ColumnBytes:
    kind = np.dtype("<i8") if column.type in (pa.large_string(), pa.large_binary()) else np.dtype("<i4")
    if nulls.any():
        column = column.take(pa.array(np.arange(len(column))))  # leaves out what stands at a null
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, kind)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    return _ColumnBytes(data or b"", int(ends[0]), ends[1:], (nulls, np.diff(ends)))
