"""Combines rows into batches of equal size, so the bytes of a file do not depend on how rows arrived."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchinfer.filesystem.part_writer import PartWriter

BATCH_ROWS = 512
_NARROW = 64  # maximum bytes of a value of a narrow type
MOST_ROWS, _MOST_BYTES = 16 * BATCH_ROWS, 4 << 20  # of a batch that combines several times BATCH_ROWS


class EvenBatches:
    """Combines rows into batches of BATCH_ROWS rows or a multiple, and passes the batches to a PartWriter.

    The bytes of a Parquet file thus do not depend on how many rows arrive at a time.
    """

    def __init__(self, writer: PartWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._none = schema.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        self._most = MOST_ROWS if all(map(_is_narrow, schema.types)) else BATCH_ROWS
        self._texts = [at for at, kind in enumerate(schema.types) if kind in (pa.string(), pa.binary())]
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows to the current batch, and pass on each full batch. Raises StorageError."""
        while batch.num_rows:
            head = batch.slice(0, BATCH_ROWS - self._rows % BATCH_ROWS)
            batch = batch.slice(head.num_rows)
            self._held.append(head)
            self._rows += head.num_rows
            self._bytes += sum(_text_bytes(head.column(at)) for at in self._texts)
            many = self._rows == self._most or self._bytes >= _MOST_BYTES
            if many and self._rows % BATCH_ROWS == 0:
                self._hand_on()

    def commit(self) -> list[Path]:
        """Write the remaining rows, finish the current part, and return the paths of all finished parts.

        Raises StorageError.
        """
        self._hand_on()
        return self._writer.commit()

    def _hand_on(self) -> None:
        if self._rows:
            self._writer.append(_one_batch([*self._none, *self._held]))
        self._held, self._rows, self._bytes = [], 0, 0


def _is_narrow(kind: pa.DataType) -> bool:
    # The bytes of texts are counted, so they count as narrow
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width <= _NARROW)
    return kind in (pa.string(), pa.binary(), pa.null()) or bool(pa.types.is_primitive(kind))


def _text_bytes(texts: pa.Array) -> int:
    # Does not depend on how the array was sliced
    offsets = texts.buffers()[1]
    if offsets is None or not len(texts):
        return 0
    ends = np.frombuffer(offsets, np.int32)
    return int(ends[texts.offset + len(texts)] - ends[texts.offset])


def _one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    # Columns without nulls have no validity bitmap
    columns = []
    for at in range(batches[0].num_columns):
        parts = [batch.column(at) for batch in batches]
        for part in parts:
            part.null_count  # noqa: B018 - counts nulls; concat_arrays then knows if there are any
        columns.append(pa.concat_arrays(parts))
    return pa.record_batch(columns, batches[0].schema)
