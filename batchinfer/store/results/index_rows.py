"""Reads the rows of an index for the results, with their passthrough columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import pyarrow as pa

from batchinfer.core.errors import BatchInferError
from batchinfer.filesystem.parquet_rows import ParquetRows
from batchinfer.filesystem.rebatch import rebatch_to
from batchinfer.store.index.index import DIMENSIONS, INPUT_ROW, LABELS, OPENING, SAMPLE, TOOLS, Index
from batchinfer.store.outputs.frame import HEAD, TAIL

# The columns of the index that results need
_READ = [*(name for name, _ in HEAD if name != "status"), "key", "token_count", *(name for name, _ in TAIL)]


class IndexRows:
    """Reads the index columns from which results are written, and passthrough columns, by row range.

    Several threads may read.
    """

    def __init__(self, index: Index) -> None:
        self._rows = ParquetRows(index.index_parts)
        self._carries = bool(len(index.passthrough_schema))
        self._values = ParquetRows(index.passthrough_parts if self._carries else ())
        self._columns = [*_READ, *([] if index.reasoning is None else [OPENING.name])]
        self._columns += [INPUT_ROW.name, SAMPLE.name] if index.samples else []
        self._columns += [] if index.tool_calls is None else [TOOLS.name]
        self._columns += [DIMENSIONS.name] if index.own_dimensions else []
        self._columns += [LABELS.name] if index.scoring is not None and index.scoring.own_labels else []

    def tables(self, start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield rows of the index in tables, each paired with a table of their passthrough values.

        Without passthrough columns, both tables of a pair are the same.

        Args:
            start: The first row.
            stop: The row after the last row.
            sizes: The numbers of rows of consecutive tables, repeated from the first one on. The last table
                may be shorter.

        Raises:
            InputCorrupt: A file is damaged.
        """
        rows = rebatch_to(self._rows.batches(start, stop, max(sizes), self._columns), cycle(sizes))
        if not self._carries:
            yield from ((table, table) for table in rows)
            return
        values = rebatch_to(self._values.batches(start, stop, max(sizes)), cycle(sizes))
        for row, value in zip(rows, values, strict=True):
            if not row.column("row_id").equals(value.column("row_id")):
                raise BatchInferError("index and passthrough parts have different rows")
            yield row, value
