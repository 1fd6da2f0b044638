"""Reads Parquet files in small batches with page checksums, and rejects decompression bombs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputCorrupt, StorageError
from batchinfer.filesystem.durable import sha256_of, storage
from batchinfer.input.chunk import InputChunk
from batchinfer.input.decompression import (
    ROW_BYTES,
    BombGuard,
    fixed_width,
    is_bomb,
    longest_value,
    refuse_bomb,
)
from batchinfer.input.formats.parquet_dictionaries import (
    WIDE_DICTIONARY,
    DoubtfulColumns,
    doubtful_columns,
)
from batchinfer.input.formats.parquet_footer import BadFooter, ColumnChunk, column_chunks
from batchinfer.input.input_file import QUERY, InputFile
from batchinfer.input.protocol import BATCH_ROWS, ReadOptions
from batchinfer.input.typed_rows import (
    declared_schema,
    join_small_parts,
    names_in_utf8,
    split_batch,
    table_rows,
)

_WIDEST = 16 << 20  # maximum bytes of a fixed-size value
_BATCH_BYTES = 64 << 20  # maximum bytes of the fixed-size values of a batch
_VALUE_BYTES = 8  # minimum uncompressed size of a list element: its levels and its dictionary index


class ParquetReader:
    """A reader of a Parquet file. Implements FormatReader."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._columns = None if options.columns is None else list(options.columns)
        self._known = options.wide
        self.sha256 = ""

    def schema(self) -> pa.Schema:
        """Return the columns of the file with their types in the results. Raises InputCorrupt if it is not Parquet."""
        with self._open() as parquet:
            return declared_schema(self._file.path, parquet.schema_arrow)

    def chunks(self) -> Iterator[InputChunk]:
        """Yield all rows of the file in order. Raises InputCorrupt if a page is damaged or the file changes."""
        before = self._file.restat()
        with self._open() as footer:
            chunks = self._chunks(footer.metadata.num_columns)
            self._check_sizes(footer, chunks)
            wide = self._known.get(self._file)
            if wide is None:
                wide = self._probe(self._doubtful(footer, chunks))
        if self._columns is None:
            self._known[self._file] = wide
        first = 0
        with self._open(wide) as parquet:
            rows = parquet.metadata.num_rows
            small = (part for batch in self._decoded(parquet, self._columns) for part in split_batch(batch))
            for part in join_small_parts(small, BATCH_ROWS):
                done = first + part.num_rows
                yield table_rows(self._file.name, part, first, self._file.size * done // max(rows, 1))
                first = done
        self.sha256 = sha256_of(self._file.location.local)
        before.check_unchanged()

    def _open(self, dictionaries: Sequence[str] | None = None) -> pq.ParquetFile:
        try:
            with names_in_utf8(self._file.path):
                return pq.ParquetFile(
                    self._file.location.local,
                    page_checksum_verification=True,
                    read_dictionary=None if dictionaries is None else [*dictionaries],
                    pre_buffer=False,
                )
        except (pa.ArrowException, EOFError) as error:
            raise InputCorrupt(f"{self._file.path}: not a Parquet file, or cut short: {error}") from None
        except OSError as error:
            if error.errno is not None:
                raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
            raise InputCorrupt(f"{self._file.path}: the Parquet footer is damaged: {error}") from None

    def _doubtful(self, footer: pq.ParquetFile, chunks: Sequence[ColumnChunk]) -> DoubtfulColumns:
        with ExitStack() as stack, storage(self._file.location.local, "read"):
            raw = stack.enter_context(self._file.location.open())
            return doubtful_columns(
                footer, chunks, self._file.size, raw, lambda names: stack.enter_context(self._open(names))
            )

    def _probe(self, doubtful: DoubtfulColumns) -> list[str]:
        # Columns with very large dictionary values are returned: they stay dictionary-encoded until the rows are sliced
        guard = BombGuard(self._file.path, None if self._file.name == QUERY else self._file.size)
        wide = doubtful.wide if self._columns is None else doubtful.wide & {*self._columns}
        names, longest = sorted(wide | doubtful.shared), dict.fromkeys(wide, 0)
        if not names:
            return []
        with self._open(names) as parquet:
            for batch in self._decoded(parquet, _columns_of(parquet, names), doubtful.rows_at_once):
                guard.add(batch.drop_columns([*(wide - doubtful.shared)]))
                for name in wide:
                    longest[name] = max(longest[name], longest_value(batch.column(name)))
        return sorted(name for name, size in longest.items() if size > WIDE_DICTIONARY)

    def _decoded(
        self, parquet: pq.ParquetFile, columns: Sequence[str] | None, most: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        done = 0
        if most is None:
            widest = sum(fixed_width(field.type) for field in parquet.schema_arrow)
            most = max(1, min(BATCH_ROWS, _BATCH_BYTES // max(1, widest)))
        try:
            for batch in parquet.iter_batches(most, columns=columns, use_threads=False):
                done += batch.num_rows
                yield batch
        except (pa.ArrowException, OSError) as error:
            raise InputCorrupt(f"{self._file.path}: damaged after row {done}: {error}") from None

    def _chunks(self, columns: int) -> list[ColumnChunk]:
        try:
            with self._file.location.open() as raw:
                found = column_chunks(raw)
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
        except BadFooter as error:
            raise InputCorrupt(f"{self._file.path}: the Parquet footer is damaged: {error}") from None
        if any(chunk.column >= columns for chunk in found):
            raise InputCorrupt(f"{self._file.path}: the Parquet footer is damaged: more chunks than columns")
        return found

    def _check_sizes(self, parquet: pq.ParquetFile, chunks: Sequence[ColumnChunk]) -> None:
        path, metadata = self._file.path, parquet.metadata
        for field in parquet.schema_arrow:
            if (width := fixed_width(field.type)) > _WIDEST:
                name = field.name[:100]
                raise InputCorrupt(
                    f"{path}: column {name!r}: every value takes {width:,} bytes; at most {_WIDEST:,} are read"
                )
        row = ROW_BYTES + sum(fixed_width(field.type) for field in parquet.schema_arrow)
        if self._file.name != QUERY:
            refuse_bomb(path, self._file.size, metadata.num_rows * row)
        values = 0
        for chunk in chunks:
            compressed = max(chunk.compressed, 1)
            if is_bomb(compressed, chunk.uncompressed):
                place = f"{path}: row group {chunk.group}, column {metadata.schema.column(chunk.column).path}"
                refuse_bomb(place, compressed, chunk.uncompressed)
            values += chunk.values * _VALUE_BYTES
        if self._file.name != QUERY:
            refuse_bomb(path, self._file.size * max(1, metadata.num_columns), values)


def _columns_of(parquet: pq.ParquetFile, paths: Sequence[str]) -> list[str]:
    # `iter_batches` only accepts leaf columns
    return [path for path in paths if path in {column.path for column in parquet.schema}]
