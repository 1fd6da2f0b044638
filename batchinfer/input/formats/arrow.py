"""Reads Arrow IPC files (.arrow, .feather version 2) and streams (.arrows) one record batch at a time.

A record batch can only be read as a whole, so its size is checked before it is read. A batch is rejected if it needs
more than half of the available memory, or expands to a thousand times its size. A file is read as the stream that it
contains, and the number of batches must equal the number in its footer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.core.errors import InputCorrupt, OutOfMemory, StorageError
from batchinfer.filesystem.durable import sha256_of
from batchinfer.input.chunk import InputChunk
from batchinfer.input.decompression import BombGuard, refuse_bomb
from batchinfer.input.formats.ipc_sizes import BadMessage, batch_sizes
from batchinfer.input.input_file import InputFile
from batchinfer.input.protocol import BATCH_ROWS, ReadOptions
from batchinfer.input.typed_rows import declared_schema, split_batch, table_rows
from batchinfer.machine.memory import available_memory

_MAGIC = b"ARROW1"
_STREAM_AT = 8  # offset of the stream in a file, after the padded magic
_SHARE = 2  # a record batch may take 1/_SHARE of the available memory
_UNREADABLE = (
    pa.types.is_list_view,
    pa.types.is_large_list_view,
    pa.types.is_union,
    pa.types.is_run_end_encoded,
)


class ArrowReader:
    """A reader of an Arrow IPC file or stream. Implements FormatReader."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._columns = options.columns
        self._valid: dict[tuple[int | None, ...], pa.Array] = {}
        self.sha256 = ""

    def schema(self) -> pa.Schema:
        """Return the columns of the file with their types in the results. Raises InputCorrupt if it is not Arrow."""
        with self._open() as (raw, _), self._stream(raw) as stream:
            return declared_schema(self._file.path, stream.schema)

    def chunks(self) -> Iterator[InputChunk]:
        """Yield all rows of the file in order, at most 512 per chunk.

        Raises:
            InputCorrupt: The file is damaged, or changes while it is read.
            OutOfMemory: A record batch is too large.
        """
        first, before = 0, self._file.restat()
        with self._open() as (raw, expected):
            self._check_sizes(raw)
            self._measure(raw)
            with self._stream(raw) as stream:
                names = self._names(stream.schema)
                for batch in self._decoded(stream, expected):
                    for part in self._small_parts(batch.select(names)):
                        yield table_rows(self._file.name, part, first, raw.tell())
                        first += part.num_rows
        self.sha256 = sha256_of(self._file.location.local)
        before.check_unchanged()

    @contextmanager
    def _open(self) -> Iterator[tuple[BinaryIO, int | None]]:
        try:
            with self._file.location.open() as raw:
                expected = None
                if raw.read(len(_MAGIC)) == _MAGIC:
                    with self._named_damage("not an Arrow file, or cut short"):
                        expected = pa.ipc.open_file(str(self._file.location.local)).num_record_batches
                raw.seek(_STREAM_AT if expected is not None else 0)
                yield raw, expected
        except FileNotFoundError:
            self._file.check_unchanged()
            raise
        except pa.ArrowException:
            raise
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None

    @contextmanager
    def _named_damage(self, what: str) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, EOFError, BadMessage) as error:
            raise InputCorrupt(f"{self._file.path}: {what}: {error}") from None

    def _stream(self, raw: BinaryIO) -> pa.RecordBatchStreamReader:
        with self._named_damage("not an Arrow file or stream, or cut short"):
            return pa.ipc.open_stream(pa.PythonFile(raw, mode="r"))

    def _check_sizes(self, raw: BinaryIO) -> None:
        start, allowed, in_all = raw.tell(), available_memory() // _SHARE, 0
        with self._named_damage("not an Arrow file or stream, or cut short"):
            for number, (compressed, uncompressed) in enumerate(batch_sizes(raw)):
                self._check_size(number, compressed, uncompressed, allowed)
                in_all += uncompressed
        refuse_bomb(self._file.path, self._file.size, in_all)
        raw.seek(start)

    def _measure(self, raw: BinaryIO) -> None:
        # Batches are only read if rows may share stored values
        start = raw.tell()
        with self._stream(raw) as stream:
            shared = [name for name in self._names(stream.schema) if _shares(stream.schema.field(name).type)]
            guard = BombGuard(self._file.path, self._file.size)
            if shared:
                for batch in self._decoded(stream, None):
                    for part in self._parts(batch.select(shared)):
                        guard.add(part)
        raw.seek(start)

    def _check_size(self, number: int, compressed: int, uncompressed: int, allowed: int) -> None:
        refuse_bomb(f"{self._file.path}: record batch {number}", compressed, uncompressed)
        if uncompressed > allowed:
            raise OutOfMemory(
                f"{self._file.path}: record batch {number} takes {uncompressed / 2**30:.2f} GiB of memory at once and "
                f"{allowed / 2**30:.2f} GiB (half of the available memory) may be used; write smaller batches "
                "(pyarrow: write_table(table, max_chunksize=10000)), or as Parquet"
            )

    def _names(self, schema: pa.Schema) -> list[str]:
        names = [name for name in schema.names if self._columns is None or name in self._columns]
        for name in names:
            if _holds_unreadable(schema.field(name).type):
                kind = schema.field(name).type
                raise InputCorrupt(
                    f"{self._file.path}: column {name!r} has the type {kind}, which cannot be read; "
                    "cast it to a list or a plain type"
                )
        return names

    def _decoded(self, stream: pa.RecordBatchStreamReader, expected: int | None) -> Iterator[pa.RecordBatch]:
        rows = count = 0
        while True:
            with self._named_damage(f"damaged after row {rows}"):
                try:
                    batch = stream.read_next_batch()
                    batch.validate()
                except StopIteration:
                    break
            rows, count = rows + batch.num_rows, count + 1
            yield batch
        if expected is not None and count != expected:
            raise InputCorrupt(f"{self._file.path}: {count} record batches, its footer counts {expected}")

    def _small_parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for part in self._parts(batch):
            yield from split_batch(part)

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            with self._named_damage(f"record batch with damaged rows from {start} on"):
                self._validate(part)
            yield part

    def _validate(self, part: pa.RecordBatch) -> None:
        # UTF-8 is validated per row; a dictionary that consecutive batches share is validated once
        for column in part.columns:
            if pa.types.is_dictionary(column.type):
                addresses = tuple(buffer and buffer.address for buffer in column.dictionary.buffers())
                if addresses not in self._valid:
                    _validate(column.dictionary)
                    # The reference keeps the addresses from being used again
                    self._valid = {addresses: column.dictionary}
                _check_indices(column)
            else:
                _validate(column)


def _check_indices(column: pa.Array) -> None:
    column.indices.validate(full=True)
    found = pc.min_max(column.indices).as_py()
    if found["min"] is not None and not 0 <= found["min"] <= found["max"] < len(column.dictionary):
        raise pa.ArrowInvalid(f"index {found['max']} in a dictionary of {len(column.dictionary)} values")


def _shares(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or kind in (pa.string_view(), pa.binary_view()):
        return True
    return any(_shares(kind.field(at).type) for at in range(kind.num_fields))


def _validate(column: pa.Array) -> None:
    if column.type in (pa.string(), pa.large_string()):
        column = column.view(pa.binary() if column.type == pa.string() else pa.large_binary())
    column.validate(full=True)


def _holds_unreadable(kind: pa.DataType) -> bool:
    if any(bool(test(kind)) for test in _UNREADABLE):
        return True
    if pa.types.is_dictionary(kind):
        return bool(pa.types.is_nested(kind.value_type))
    return any(_holds_unreadable(kind.field(at).type) for at in range(kind.num_fields))
