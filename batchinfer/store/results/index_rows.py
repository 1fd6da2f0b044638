"""Reads the rows of an index for the results, with their passthrough columns."""

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
from batchinfer.store.outputs.kind import RequestedOutputs

# The columns of the index that results need
_READ = [*(name for name, _ in HEAD if name != "status"), "key", "token_count", *(name for name, _ in TAIL)]


class IndexView(RequestedOutputs, Protocol):
    """The part of a job's index that publishing needs."""

    @property
    def index_parts(self) -> Sequence[Path]:
        """Return the index parts in row order."""

    @property
    def passthrough_parts(self) -> Sequence[Path]:
        """Return the parts with `row_id` and the passthrough columns, for the rows of the index, or an empty list."""

    @property
    def passthrough_schema(self) -> pa.Schema:
        """Return the types of the passthrough columns, without `row_id`."""

    @property
    def expected(self) -> str | None:
        """Return the passthrough column with the expected answers, or None."""

    @property
    def output(self) -> str:
        """Return the name of the kind of answers."""

    @property
    def attempts(self) -> int:
        """Return the maximum attempts per row. The result has a column for the attempt if there may be several."""

    @property
    def samples(self) -> bool:
        """Return True if consecutive rows of the index may belong to the same input row."""

    @property
    def best(self) -> BestOf | None:
        """Return how many samples per row are published, or None for all."""

    @property
    def engine_class(self) -> bool:
        """Return True if the result has a column for the machine class of each answer."""

    @property
    def rows(self) -> int:
        """Return the number of rows of the index, error rows included."""

    @property
    def reused(self) -> ReusedRows:
        """Return the first rows, which were reused whole."""

    @property
    def segments(self) -> PendingSegments | None:
        """Return the segments of the other rows, if the next run can reuse them."""


class IndexRows:
    """The rows of an index, read by row range. Several threads may read them."""

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
        """Yield the rows from `start` to `stop` and their passthrough values, as pairs of tables.

        The tables have these sizes, repeated from the first one on; the last table may be shorter. Without passthrough
        columns, both tables of a pair are the same. Raises InputCorrupt for a damaged file.
        """
        rows = cut(self._rows.batches(start, stop, max(sizes), self._columns), cycle(sizes))
        if not self._carries:
            yield from ((table, table) for table in rows)
            return
        values = cut(self._values.batches(start, stop, max(sizes)), cycle(sizes))
        for row, value in zip(rows, values, strict=True):
            if not row.column("row_id").equals(value.column("row_id")):
                raise BatchInferError("index and passthrough parts have different rows")
            yield row, value
