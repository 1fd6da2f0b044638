"""Writes Parquet parts of limited size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.filesystem.durable import DurableFile, FileOps

PART_ROWS = 100_000
_GROUP_ROWS = 8192
_GROUP_BYTES = 16 << 20


class PartWriter:
    """Writes rows to numbered Parquet parts of limited size, such as part-00000.parquet.

    A context manager: call `commit()` at the end, otherwise the last part is discarded. Pages have checksums.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        ops: FileOps,
        part_rows: int = PART_ROWS,
        distinct: Collection[str] = (),
        before: Sequence[Path] = (),
    ) -> None:
        """Prepare to write Parquet parts. Nothing is created yet.

        Args:
            folder: The folder of the parts.
            schema: The schema of the parts.
            ops: File operations.
            part_rows: Maximum rows per part.
            distinct: Columns whose values hardly ever repeat. They are written without dictionaries.
            before: Existing parts. New parts are numbered after them.
        """
        self._folder = folder
        self._schema = schema
        self._ops = ops
        self._part_rows, self._distinct = part_rows, distinct
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        self._rows_in_part = 0
        self._file: DurableFile | None = None
        self._writer: pq.ParquetWriter | None = None
        self.parts = [*before]

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows to the current Parquet part. A batch is split where a part is full."""
        while batch.num_rows:
            room = self._part_rows - self._rows_in_part
            head = batch.slice(0, room)
            batch = batch.slice(head.num_rows)
            self._hold(head)

    def _hold(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        self._rows_in_part += batch.num_rows
        full = self._rows_in_part >= self._part_rows
        if full or self._held_rows >= _GROUP_ROWS or self._held_bytes >= _GROUP_BYTES:
            self._write_group()
        if full:
            self._finish_part()

    def _write_group(self) -> None:
        if not self._held_rows:
            return
        if self._writer is None:
            path = self._folder / f"part-{len(self.parts):05d}.parquet"
            self._file, self._writer = open_part(path, self._schema, self._ops, self._distinct)
        self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
        self._held, self._held_rows, self._held_bytes = [], 0, 0

    def _finish_part(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.commit()
            self.parts.append(self._file.path)
        self._file = self._writer = None
        self._rows_in_part = 0

    def commit(self) -> list[Path]:
        """Finish the current Parquet part, and return the paths of all parts in order. Raises StorageError.

        Parts that existed before are included.
        """
        self._write_group()
        self._finish_part()
        return self.parts

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # discarded first, so the footer of the writer is not written
        if self._writer is not None:
            self._writer.close()


def open_part(
    path: Path, schema: pa.Schema, ops: FileOps, distinct: Collection[str] = ()
) -> tuple[DurableFile, pq.ParquetWriter]:
    """Create a Parquet file with page checksums, and return the file and its writer.

    The caller closes the writer first, then commits the file.

    Args:
        path: The file.
        schema: Its columns.
        ops: File operations.
        distinct: Columns whose values hardly ever repeat, such as keys. They are written without
            dictionaries, which is twice as fast.
    """
    file = DurableFile(path, ops)
    writer = pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
        use_dictionary=[name for name in schema.names if name not in distinct] if distinct else True,
    )
    return file, writer


def rewrite_part(path: Path, table: pa.Table, ops: FileOps) -> None:
    """Replace the Parquet part at `path` by a file with the rows of `table`, atomically."""
    file, writer = open_part(path, table.schema, ops)
    try:
        writer.write_table(table)
        writer.close()
        file.commit()
    finally:
        file.close()
