"""Writes the report table `rows`: each row's key of the request that answered it, to join results with requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.machine.folders import make_folder
from batchinfer.report.tables.columns.declared import ROWS, SCHEMAS
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
    """Write the report table `rows` of a run atomically, and return its path.

    The table maps each row of the result to the work key of the request that answered it. Rows without a work
    key, which became no request, are left out.

    Args:
        folder: The folder of report tables.
        run_id: The id of the run.
        parts: Parts of the index.
        columns: The index columns with work keys, one for each attempt.
        which: [rows], the number of the attempt in `columns` that gave the answer, from 0. None: the first.
        ids: The index column with the ids of rows in the result. Several index rows may have the same id.

    Raises:
        OSError: The table cannot be written.
    """
    with _open_spool(folder, run_id) as spool:
        for batch in _batches(parts, [*dict.fromkeys(("row_id", ids)), *columns]):
            keys = batch.column(columns[0]) if which is None else _chosen(batch, columns, which)
            spool.write(pa.Table.from_batches([_row_batch(run_id, batch.column(ids), keys)]))
        return spool.finish()


class RowKeysWriter:
    """Writes the report table `rows` in a thread while the result is prepared, for rows with one work key each.

    A context manager, which deletes the table unless it was finished.
    """

    def __init__(self, folder: Path, run_id: str, parts: Sequence[Path], ids: str) -> None:
        """Begin to write the table in a thread. `write_rows` documents the arguments."""
        self._arguments = folder, run_id, parts, ids
        self._stops = False
        thread = ThreadPoolExecutor(1, "rows of the report")
        self._written = thread.submit(self._write)
        thread.shutdown(wait=False)

    def __enter__(self) -> RowKeysWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stops = True
        if self._written.exception() is None:
            self._written.result().abort()

    def finish(self) -> Path:
        """Wait for the thread, complete the report table `rows`, and return its path. Raises OSError."""
        return self._written.result().finish()

    def _write(self) -> Spool:
        folder, run_id, parts, ids = self._arguments
        spool = _open_spool(folder, run_id)
        try:
            for batch in _batches(parts, [ids, "key"]):
                if self._stops:
                    break
                rows = _row_batch(run_id, batch.column(ids), batch.column("key"))
                spool.write(pa.Table.from_batches([rows]))
        except BaseException:
            spool.abort()
            raise
        return spool


def _open_spool(folder: Path, run_id: str) -> Spool:
    make_folder(folder)
    return Spool(table_path(folder, ROWS, run_id), SCHEMAS[ROWS], dictionary=["run_id"])


def _batches(parts: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with pq.ParquetFile(part) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=columns)


def _chosen(batch: pa.RecordBatch, columns: Sequence[str], which: NDArray[np.uint8]) -> pa.Array:
    numbers = pa.array(which[batch.column("row_id").to_numpy()].astype(np.int64))
    return pc.choose(numbers, *(batch.column(name) for name in columns))


def _row_batch(run_id: str, rows: pa.Array, keys: pa.Array) -> pa.RecordBatch:
    valid = pc.is_valid(keys)
    rows, keys = rows.filter(valid), keys.filter(valid)
    run = pa.array([run_id], pa.string()).take(pa.array(np.zeros(len(rows), np.int8)))
    columns = [run, rows, hexadecimal(keys)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[ROWS])


def hexadecimal(keys: pa.Array) -> pa.StringArray:
    """Return 32-byte work keys as hexadecimal text.

    Args:
        keys: An Arrow array of keys without nulls.
    """
    data = keys.buffers()[1]
    raw = b"" if data is None else data.to_pybytes()
    text = raw[keys.offset * KEY_BYTES : (keys.offset + len(keys)) * KEY_BYTES].hex().encode()
    offsets = np.arange(len(keys) + 1, dtype=np.int32) * (2 * KEY_BYTES)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))
