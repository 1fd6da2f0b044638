"""The table `rows`: which piece of work answered which row, so that results can be joined to requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.report.tables.columns import ROWS, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool

BATCH_ROWS = 65_536  # 4 MiB of keys as text
KEY_BYTES = 32


def write_rows(
    folder: Path,
    run_id: str,
    parts: Sequence[Path],
    columns: Sequence[str] = ("key",),
    which: NDArray[np.uint8] | None = None,
    ids: str = "row_id",
) -> Path:
    """Write the table, whole or not at all. Raises OSError.

    `parts` are Parquet files with `row_id` and keys (binary); rows without a key became no request and are left out. A
    row's key stands in the first of the `columns`, or in the one that `which` says, by row. `ids`: the column with the
    ids that rows have in the result, several of them the same one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Spool(table_path(folder, ROWS, run_id), SCHEMAS[ROWS], dictionary=["run_id"]) as spool:
        for batch in _batches(parts, [*dict.fromkeys(("row_id", ids)), *columns]):
            keys = batch.column(columns[0]) if which is None else _chosen(batch, columns, which)
            spool.write(pa.Table.from_batches([_row_batch(run_id, batch.column(ids), keys)]))
        return spool.finish()


def _batches(parts: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with pq.ParquetFile(part) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=columns)


def _chosen(batch: pa.RecordBatch, columns: Sequence[str], which: NDArray[np.uint8]) -> pa.Array:
    numbers = pa.array(which[batch.column("row_id").to_numpy()].astype(np.int64))
    return pc.choose(numbers, *(batch.column(name) for name in columns))


def _row_batch(run_id: str, rows: pa.Array, keys: pa.Array) -> pa.RecordBatch:
    there = pc.is_valid(keys)
    rows, keys = rows.filter(there), keys.filter(there)
    run = pa.array([run_id], pa.string()).take(pa.array(np.zeros(len(rows), np.int8)))
    columns = [run, rows, hexadecimal(keys)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[ROWS])


def hexadecimal(keys: pa.Array) -> pa.StringArray:
    """32-byte keys without nulls as text, all at once: ten million one by one would take as long as the rest."""
    data = keys.buffers()[1]
    raw = b"" if data is None else data.to_pybytes()
    text = raw[keys.offset * KEY_BYTES : (keys.offset + len(keys)) * KEY_BYTES].hex().encode()
    offsets = np.arange(len(keys) + 1, dtype=np.int32) * (2 * KEY_BYTES)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))
