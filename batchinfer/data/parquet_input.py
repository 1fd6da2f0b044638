"""Parquet files, read in small batches and with page checksums, guarded against files that unpack to gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.data.files import InputFile, sha256_of
from batchinfer.data.rows import RowBatch, Values, row_error
from batchinfer.errors import InputCorrupt, StorageError
from batchinfer.request import RowError

_BATCH_ROWS = 512
_SLICE_BYTES = 4 << 20  # of one RowBatch, as long as it has more than one row
# A page must be unpacked whole. Columns of text reach 50-fold; no honest one of this size reaches 1000-fold.
_BOMB_BYTES = 256 << 20
_BOMB_RATIO = 1000
_WIDE_DICTIONARY = 128 << 10  # a dictionary value of this size, repeated in 512 rows, is 64 MiB


class ParquetReader:
    """One Parquet file. After `batches()` has ended, `sha256` identifies what was read."""

    def __init__(self, file: InputFile, columns: list[str] | None = None) -> None:
        self._file = file
        self._columns = columns
        self.sha256 = ""

    def schema(self) -> pa.Schema:
        """Names and types, dictionaries unpacked. Raises InputCorrupt for what is not Parquet."""
        with self._open() as parquet:
            return plain_schema(parquet.schema_arrow)

    def batches(self) -> Iterator[RowBatch]:
        """Rows in file order. Raises InputCorrupt when a page is damaged or the file changes."""
        with self._open() as probe:
            self._check_sizes(probe.metadata)
            wide = _wide_dictionaries(probe)
        first = 0
        with self._open(wide) as parquet:
            for batch in self._decoded(parquet):
                for part in _sliced(batch):
                    yield self._batch(part, first, parquet.metadata.num_rows)
                    first += part.num_rows
        self.sha256 = sha256_of(self._file.path)
        self._file.check_unchanged()

    def _open(self, dictionaries: list[str] | None = None) -> pq.ParquetFile:
        try:
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
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=self._columns, use_threads=False):
                done += batch.num_rows
                yield batch
        except (pa.ArrowException, OSError) as error:
            raise InputCorrupt(f"{self._file.path}: damaged after row {done}: {error}") from None

    def _batch(self, part: pa.RecordBatch, first: int, total: int) -> RowBatch:
        part = _unpacked(part)
        rows = self._rows(part)
        return RowBatch(
            self._file.name, first, rows, part, self._file.size * (first + len(rows)) // max(total, 1)
        )

    def _rows(self, part: pa.RecordBatch) -> list[Values | RowError]:
        try:
            columns = [_values(column) for column in part.columns]
        except UnicodeDecodeError:
            return self._rows_apart(part)
        names = part.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [
            {}
        ] * part.num_rows

    def _rows_apart(self, part: pa.RecordBatch) -> list[Values | RowError]:
        """One row after the other, so that the row that is not UTF-8 costs itself only."""
        if part.num_rows > 1:
            return [row for i in range(part.num_rows) for row in self._rows(part.slice(i, 1))]
        return [row_error("bad_utf8", f"{self._file.name}: a text column of this row is not UTF-8")]

    def _check_sizes(self, metadata: pq.FileMetaData) -> None:
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                unpacked, packed = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 1)
                if unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * packed:
                    raise InputCorrupt(
                        f"{self._file.path}: row group {group}, column {chunk.path_in_schema}: {packed} bytes would "
                        f"unpack to {unpacked}; that looks like a decompression bomb"
                    )


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Without metadata; dictionary columns have the type of their values."""
    return pa.schema([(f.name, _plain(f.type)) for f in schema])


def check_same_schema(first: InputFile, schema: pa.Schema, other: InputFile, found: pa.Schema) -> None:
    """Raises InputCorrupt naming the first column that differs in name or type; order does not matter."""
    for name in dict.fromkeys([*schema.names, *found.names]):
        want = schema.field(name).type if name in schema.names else "no such column"
        have = found.field(name).type if name in found.names else "no such column"
        if want != have:
            raise InputCorrupt(
                f"{other.path}: column {name!r}: {have}, but {want} in {first.path}; "
                "all files of a job need the same columns (convert them, or use input.sql)"
            )


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _values(column: pa.Array) -> list[Any]:
    """As Python sees them. Times finer than Python's are cut to microseconds, those beyond its years are text."""
    coarse = _in_microseconds(column.type)
    try:
        return list((column if coarse == column.type else column.cast(coarse, safe=False)).to_pylist())
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        return list(column.cast(pa.string()).to_pylist())


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _in_microseconds(field.type)) for field in kind])
    return kind


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


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halved until each part, unpacked, is small or a single row."""
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or _unpacked_size(batch) <= _SLICE_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _sliced(batch.slice(0, half))
    yield from _sliced(batch.slice(half))


def _unpacked_size(batch: pa.RecordBatch) -> int:
    return sum(_column_size(column) for column in batch.columns)


def _column_size(column: pa.Array) -> int:
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def _unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
    return pa.record_batch(arrays, names=batch.schema.names)
