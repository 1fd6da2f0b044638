"""Rows in batches of equal size, whatever the sizes in which they came: files that are made of them are the same to the
byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from batchinfer.data.storage.part_writer import PartWriter

BATCH_ROWS = 512


class EvenBatches:
    """Hands rows on to a PartWriter, BATCH_ROWS at a time."""

    def __init__(self, writer: PartWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._none = schema.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        self._held: list[pa.RecordBatch] = []
        self._rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows to those that are held. Raises StorageError."""
        while batch.num_rows:
            head = batch.slice(0, BATCH_ROWS - self._rows)
            batch = batch.slice(head.num_rows)
            self._held.append(head)
            self._rows += head.num_rows
            if self._rows == BATCH_ROWS:
                self._hand_on()

    def commit(self) -> list[Path]:
        """Hand on the rest, and finish the parts. Raises StorageError."""
        self._hand_on()
        return self._writer.commit()

    def _hand_on(self) -> None:
        if self._rows:
            self._writer.append(_one_batch([*self._none, *self._held]))
        self._held, self._rows = [], 0


def _one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows in memory of their own, which has marks of nulls only where there are nulls."""
    columns = []
    for at in range(batches[0].num_columns):
        parts = [batch.column(at) for batch in batches]
        for part in parts:
            part.null_count  # noqa: B018 - counted here, it is known when the parts are joined
        columns.append(pa.concat_arrays(parts))
    return pa.record_batch(columns, batches[0].schema)
