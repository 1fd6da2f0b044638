"""The rows of an index as results are made of them, beside the columns that are carried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchinfer.core.errors import BatchInferError
from batchinfer.filesystem.parquet_rows import ParquetRows
from batchinfer.filesystem.rebatch import cut
from batchinfer.store.index.index import (
    DIMENSIONS,
    INPUT_ROW,
    LABELS,
    OPENING,
    SAMPLE,
    TOOLS,
    BestOf,
    PendingSegments,
)
from batchinfer.store.index.reused_rows import ReusedRows
from batchinfer.store.outputs.frame import HEAD, TAIL
from batchinfer.store.outputs.kind import AskedOutputs

# The columns of the index that results are made of
_READ = [*(name for name, _ in HEAD if name != "status"), "key", "token_count", *(name for name, _ in TAIL)]


class IndexView(AskedOutputs, Protocol):
    """The part of a job's index that publishing needs."""

    @property
    def index_parts(self) -> Sequence[Path]:
        """Index parts in row order."""

    @property
    def passthrough_parts(self) -> Sequence[Path]:
        """Parts with `row_id` and the passthrough columns, in the rows of the index; empty if there are
        none.
        """

    @property
    def passthrough_schema(self) -> pa.Schema:
        """Types of the passthrough columns, without `row_id`."""

    @property
    def expected(self) -> str | None:
        """The passthrough column with the values that answers should have; None: there is none."""

    @property
    def output(self) -> str:
        """The name of the kind of answers."""

    @property
    def attempts(self) -> int:
        """How many times a row may run; the result has a column for it where that is more than once."""

    @property
    def samples(self) -> bool:
        """Whether several rows of the index, one after the other, may be a row of the input."""

    @property
    def best(self) -> BestOf | None:
        """How many of these are rows of the result, the best ones; None: all."""

    @property
    def engine_class(self) -> bool:
        """Whether the result has a column for the class of machine that gave each answer."""

    @property
    def rows(self) -> int:
        """Rows of the index, bad ones included."""

    @property
    def reused(self) -> ReusedRows:
        """Its first rows, which were taken over whole."""

    @property
    def segments(self) -> PendingSegments | None:
        """The segments of the others, if they can be taken over the next time."""


class IndexRows:
    """The rows of an index, any segment of them; several threads may read them."""

    def __init__(self, index: IndexView) -> None:
        self._rows = ParquetRows(index.index_parts)
        self._carries = bool(len(index.passthrough_schema))
        self._values = ParquetRows(index.passthrough_parts if self._carries else ())
        self._columns = [*_READ, *([] if index.reasoning is None else [OPENING.name])]
        self._columns += [INPUT_ROW.name, SAMPLE.name] if index.samples else []
        self._columns += [] if index.tool_calls is None else [TOOLS.name]
        self._columns += [DIMENSIONS.name] if index.own_dimensions else []
        self._columns += [LABELS.name] if index.scoring is not None and index.scoring.own_labels else []

    def tables(self, start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield the rows from `start` to `stop` and their passthrough values, side by side, in tables of these sizes,
        over and over; the last may be shorter. Raises InputCorrupt for a damaged file."""
        rows = cut(self._rows.batches(start, stop, max(sizes), self._columns), cycle(sizes))
        if not self._carries:
            yield from ((table, table) for table in rows)
            return
        values = cut(self._values.batches(start, stop, max(sizes)), cycle(sizes))
        for row, value in zip(rows, values, strict=True):
            if not row.column("row_id").equals(value.column("row_id")):
                raise BatchInferError("index and passthrough parts do not hold the same rows")
            yield row, value
