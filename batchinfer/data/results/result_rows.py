"""Result rows: one for every input row, in input order, in a schema that is fixed before the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.errors import BatchInferError
from batchinfer.data.columns.logprob_column import Detokenizer
from batchinfer.data.index.index import AnswerSchema
from batchinfer.data.outputs.registry import KINDS
from batchinfer.data.results.join import FINISHED_SCHEMA, finished_rows
from batchinfer.data.storage.duck import Watched
from batchinfer.data.storage.rebatch import parquet_batches, rebatch

# Rows decoded, joined and held at a time, and the row group of a result file. 1,024, 4,096 and 16,384 published
# 100,000 rows of 40 tokens equally fast within the noise (26 to 64 thousand rows a second on two busy cores), with
# files of 5.5, 5.3 and 5.3 MB: small enough for long rows, large enough for the compression.
BATCH_ROWS = 4096


class IndexView(Protocol):
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
    def answers(self) -> AnswerSchema | None:
        """Return the schema of answers; None if the result has no columns of their parts."""

    @property
    def logprobs(self) -> int | None:
        """The most log-probabilities a token that a row asks for; None: the result has no column for them."""

    @property
    def output(self) -> str:
        """The name of the kind of answers."""

    @property
    def rows(self) -> int:
        """Rows of the input, bad ones included."""


def result_schema(index: IndexView) -> pa.Schema:
    """The schema of a result. Raises ValueError when a passthrough column has the name of one of ours."""
    ours = KINDS[index.output].schema(index)
    clash = sorted(set(index.passthrough_schema.names) & set(ours.names))
    if clash:
        raise ValueError(f"output.columns: {', '.join(clash)}: the result has a column of this name already")
    return pa.schema([*ours, *index.passthrough_schema])  # without metadata: it may name tools and hosts


def result_tables(
    index: IndexView,
    completion_parts: Sequence[Path],
    detokenizer: Detokenizer,
    spill: Path,
    *,
    partial: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> Iterator[pa.Table]:
    """The result in tables of at most BATCH_ROWS rows, fewer where they are large, in `result_schema`.

    A row whose key has no completion is left out with `partial`, and a BatchInferError without.
    """
    kind, schema = KINDS[index.output], result_schema(index)
    stored = pa.schema([*FINISHED_SCHEMA, *kind.read(index)])
    batch_rows = kind.batch_rows(index) or BATCH_ROWS
    found = finished_rows(
        index.index_parts,
        completion_parts,
        spill,
        memory_limit=memory_limit,
        threads=threads,
        batch_rows=batch_rows,
        schema=stored,
        watched=watched,
    )
    finished = _Finished(found, stored)
    for rows, passthrough in _zipped(index, batch_rows):
        matched = finished.matching(rows.column("row_id").to_numpy())
        table = kind.table(index, rows, matched, detokenizer)
        for field in index.passthrough_schema:
            table = table.append_column(field, passthrough.column(field.name))
        missing = pc.and_(pc.is_valid(rows.column("key")), pc.is_null(matched.column("row_id")))
        if pc.any(missing).as_py():
            if not partial:
                raise BatchInferError(
                    f"{pc.sum(missing).as_py()} rows have no completion yet: nothing published"
                )
            table = table.filter(pc.invert(missing))
        yield table.cast(schema)
    finished.close()


def _zipped(index: IndexView, batch_rows: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Index rows and their passthrough values, side by side."""
    rows = rebatch(parquet_batches(index.index_parts, batch_rows), batch_rows)
    if not len(index.passthrough_schema):
        yield from ((table, table) for table in rows)
        return
    values = rebatch(parquet_batches(index.passthrough_parts, batch_rows), batch_rows)
    for row, value in zip(rows, values, strict=True):
        if not row.column("row_id").equals(value.column("row_id")):
            raise BatchInferError("index and passthrough parts do not hold the same rows")
        yield row, value


class _Finished:
    """The stream of finished rows, read along with the index."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._held = schema.empty_table()

    def matching(self, row_ids: NDArray[np.int64]) -> pa.Table:
        """A table as long as `row_ids` (ascending): each row's completion, or nulls."""
        self._read_through(int(row_ids[-1]))
        held = self._held.column("row_id").to_numpy()
        count = int(np.searchsorted(held, row_ids[-1], side="right"))
        places = np.full(len(row_ids), -1, np.int64)
        places[np.searchsorted(row_ids, held[:count])] = np.arange(count)
        matched = self._held.take(pa.array(places, mask=places < 0))
        self._held = self._held.slice(count)
        return matched.combine_chunks()

    def close(self) -> None:
        """Drain the stream, so that the database behind it closes."""
        for _ in self._batches:
            raise BatchInferError("the store's join has more rows than the index")

    def _read_through(self, row_id: int) -> None:
        while not self._held.num_rows or self._held.column("row_id")[-1].as_py() < row_id:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])]).combine_chunks()
