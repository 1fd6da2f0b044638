"""Parquet files, read in small batches and with page checksums, guarded against files that unpack to gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.protocol import BATCH_ROWS, Format, ReadOptions
from batchinfer.data.input.rows import RowBatch
from batchinfer.data.input.typed_rows import declared_schema, names_in_utf8, refuse_bomb, row_batch, sliced
from batchinfer.data.storage.durable import sha256_of
from batchinfer.errors import InputCorrupt, StorageError

# A page must be unpacked whole. Columns of text reach 50-fold; no honest one of this size reaches 1000-fold.
_WIDE_DICTIONARY = 128 << 10  # a dictionary value of this size, repeated in 512 rows, is 64 MiB


class ParquetReader:
    """One Parquet file. After `batches()` has ended, `sha256` identifies what was read."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._columns = None if options.columns is None else list(options.columns)
        self.sha256 = ""

    def schema(self) -> pa.Schema:
        """Names and types, dictionaries unpacked. Raises InputCorrupt for what is not Parquet."""
        with self._open() as parquet:
            return declared_schema(self._file.path, parquet.schema_arrow)

    def batches(self) -> Iterator[RowBatch]:
        """Rows in file order. Raises InputCorrupt when a page is damaged or the file changes."""
        before = self._file.opened()
        with self._open() as probe:
            self._check_sizes(probe.metadata)
            wide = _wide_dictionaries(probe)
        first = 0
        with self._open(wide) as parquet:
            rows = parquet.metadata.num_rows
            for batch in self._decoded(parquet):
                for part in sliced(batch):
                    done = first + part.num_rows
                    yield row_batch(self._file.name, part, first, self._file.size * done // max(rows, 1))
                    first = done
        self.sha256 = sha256_of(Path(self._file.path))
        before.check_unchanged()

    def _open(self, dictionaries: list[str] | None = None) -> pq.ParquetFile:
        try:
            with names_in_utf8(self._file.path):
                return pq.ParquetFile(
                    self._file.path,
                    page_checksum_verification=True,
                    read_dictionary=dictionaries,
                    pre_buffer=False,
                )
        except (pa.ArrowException, EOFError) as error:
            raise InputCorrupt(f"{self._file.path}: not a Parquet file, or cut short: {error}") from None
        except OSError as error:
            if error.errno is not None:
                raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
            raise InputCorrupt(f"{self._file.path}: the Parquet footer is damaged: {error}") from None

    def _decoded(self, parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
        done = 0
        try:
            for batch in parquet.iter_batches(BATCH_ROWS, columns=self._columns, use_threads=False):
                done += batch.num_rows
                yield batch
        except (pa.ArrowException, OSError) as error:
            raise InputCorrupt(f"{self._file.path}: damaged after row {done}: {error}") from None

    def _check_sizes(self, metadata: pq.FileMetaData) -> None:
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                place = f"{self._file.path}: row group {group}, column {chunk.path_in_schema}"
                refuse_bomb(place, max(chunk.total_compressed_size, 1), chunk.total_uncompressed_size)


def _wide_dictionaries(parquet: pq.ParquetFile) -> list[str]:
    """Text columns where one stored value may stand in many rows: kept packed until the rows are cut small."""
    found: set[str] = set()
    metadata, names = parquet.metadata, set(parquet.schema_arrow.names)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            wide = chunk.physical_type == "BYTE_ARRAY" and chunk.total_uncompressed_size > _WIDE_DICTIONARY
            if wide and chunk.has_dictionary_page and chunk.path_in_schema in names:
                found.add(chunk.path_in_schema)
    return sorted(found)


FORMAT = Format("parquet", "Parquet", (".parquet", ".pq"), False, (b"PAR1",), ParquetReader)
