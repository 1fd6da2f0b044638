"""Rows of typed formats (Parquet, Arrow): splits them into small parts and converts them to Python values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa

from batchinfer.core.errors import InputCorrupt
from batchinfer.core.request import RowError
from batchinfer.input.chunk import InputChunk
from batchinfer.input.decompression import expanded_size
from batchinfer.input.input_file import InputFile
from batchinfer.input.rows import Values, first_repeated, row_error

_SLICE_BYTES = 4 << 20  # maximum expanded size of a chunk with more than one row


def declared_schema(path: str, schema: pa.Schema) -> pa.Schema:
    """Return the schema of an input file with the types that its columns get in the results, without metadata.

    View types become the plain types. Dictionaries of texts stay dictionaries, with 32-bit indices; other dictionaries
    become the type of their values.

    Args:
        path: The path of the file, for messages.
        schema: The schema of the file.

    Raises:
        InputCorrupt: Two columns, or two fields of a struct, have the same name, or a name is not UTF-8.
    """
    with names_in_utf8(path):
        _check_names(path, "columns", list(schema))
    return pa.schema([(f.name, _declared(f.type)) for f in schema])


@contextmanager
def names_in_utf8(path: str) -> Iterator[None]:
    """Turn a UnicodeDecodeError inside the `with` block into InputCorrupt: a column name of the file is not UTF-8.

    Args:
        path: The path of the file, for the message.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputCorrupt(
            f"{path}: the name of a column is not UTF-8 ({error.object[:100]!r}); write the file with names in UTF-8"
        ) from None


def _check_names(path: str, what: str, fields: list[pa.Field]) -> None:
    twice = first_repeated(field.name for field in fields)
    if twice is not None:
        raise InputCorrupt(
            f"{path}: two {what} have the name {twice[:100]!r}; give each its own (DuckDB calls the second one "
            f"{twice[:100] + '_1'!r}: input.sql can rename it)"
        )
    for field in fields:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        below = [kind.field(at) for at in range(kind.num_fields)]
        _check_names(path, f"fields of {field.name[:100]!r}", below)


def common_schema(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return one schema for two files that have the same columns, as `check_same_schema` ensures.

    A column stays dictionary-encoded only if both files encode it in the same way.
    """
    kinds = {field.name: field.type for field in other}
    fields = [f if f.type == kinds[f.name] else pa.field(f.name, _plain(f.type)) for f in one]
    return pa.schema(fields)


def check_same_schema(first: InputFile, schema: pa.Schema, other: InputFile, found: pa.Schema) -> None:
    """Raise InputCorrupt for the first column whose name or type differs between two files.

    The order of columns and dictionary encoding are ignored.

    Args:
        first: One file, for the message.
        schema: The schema of `first`.
        other: Another file, for the message.
        found: The schema of `other`.
    """
    wanted, had = ({field.name: _plain(field.type) for field in one} for one in (schema, found))
    for name in wanted | had:
        want, have = wanted.get(name, "no such column"), had.get(name, "no such column")
        if want != have:
            raise InputCorrupt(
                f"{other.path}: column {name!r}: {have}, but {want} in {first.path}; "
                "all files of a job need the same columns (convert them, or use input.sql)"
            )


def table_rows(file: str, part: pa.RecordBatch, first: int, bytes_read: int) -> TypedRows:
    """Return rows of a typed file as a chunk, with dictionaries and views expanded.

    A row with text that is not UTF-8 becomes an error row when the chunk is parsed.

    Args:
        file: The file's name in the results.
        part: The rows.
        first: The number of the first row in the file, from 0.
        bytes_read: How far the file has been read at the end of the part, in bytes on disk.
    """
    table = _expand(part)
    return TypedRows(file=file, bytes_read=bytes_read, most_rows=table.num_rows, first_row=first, table=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedRows(InputChunk):
    """A chunk of a typed format (Parquet, Arrow), with its rows in an Arrow table."""

    def serialize(self) -> tuple[Self, bytes]:
        """Return a copy of the chunk without its table, and the table as an Arrow stream."""
        if self.table is None:
            raise ValueError("rows that are packed already")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as stream:
            stream.write_batch(self.table)
        return replace(self, table=None), sink.getvalue().to_pybytes()

    def deserialize(self, data: bytes) -> Self:
        """Return a copy of the chunk with the table from `data`, the Arrow stream that `serialize` returned."""
        with pa.ipc.open_stream(data) as stream:
            return replace(self, table=stream.read_next_batch())

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Yield the rows from `start` to before `stop`, as values by column, or as a RowError if a text is not UTF-8.

        Args:
            start: The first row, counted from the start of the chunk.
            stop: The row after the last one, or None for all rows.
            values: The names of the columns to return, or None for all. The other columns are only validated.
        """
        if self.table is None:
            raise ValueError("rows that are packed")
        part = self.table.slice(start, None if stop is None else stop - start)
        return iter(_checked_rows(self.file, part, values))


def _checked_rows(
    file: str, part: pa.RecordBatch, values: Collection[str] | None
) -> Sequence[Values | RowError]:
    wanted = [name for name in part.schema.names if values is None or name in values]
    others = [name for name in part.schema.names if name not in wanted]
    try:
        for name in others:
            part.column(name).validate(full=True)
    except pa.ArrowInvalid:
        return _rows(file, part)
    found = _rows(file, part.select(wanted)) if wanted else [{}] * part.num_rows
    return _rows(file, part) if others and any(isinstance(row, RowError) for row in found) else found


def _rows(file: str, part: pa.RecordBatch) -> list[Values | RowError]:
    try:
        columns = [_values(column) for column in part.columns]
    except UnicodeDecodeError:
        return _rows_one_by_one(file, part)
    names = part.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * part.num_rows


def _rows_one_by_one(file: str, part: pa.RecordBatch) -> list[Values | RowError]:
    # One at a time, only rows with text that is not UTF-8 become errors
    if part.num_rows > 1:
        return [row for i in range(part.num_rows) for row in _rows(file, part.slice(i, 1))]
    return [row_error("bad_utf8", f"{file}: a text column of this row is not UTF-8")]


def blank_rows(part: pa.RecordBatch, bad: Collection[int]) -> pa.RecordBatch:
    """Return a copy of a table in which all values of some rows are null.

    `bad` are the numbers of these rows, from 0.
    """
    return part.take(pa.array([None if at in bad else at for at in range(part.num_rows)], pa.int64()))


def split_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts of at most 4 MiB when expanded. A single row may be larger."""
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or expanded_size(batch) <= _SLICE_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from split_batch(batch.slice(0, half))
    yield from split_batch(batch.slice(half))


def join_small_parts(parts: Iterable[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """Join consecutive small parts to batches of up to `most` rows and 4 MiB when expanded, and yield the batches.

    A part that is larger is yielded alone.
    """
    held, rows, held_bytes = list[pa.RecordBatch](), 0, 0
    for part in parts:
        part_bytes = expanded_size(part)
        if held and (rows + part.num_rows > most or held_bytes + part_bytes > _SLICE_BYTES):
            yield _join(held)
            held, rows, held_bytes = [], 0, 0
        held.append(part)
        rows, held_bytes = rows + part.num_rows, held_bytes + part_bytes
    if held:
        yield _join(held)


def _join(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches([_expand(one) for one in parts])


def _expand(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [_plain_array(column) for column in batch.columns]
    return pa.record_batch(arrays, names=batch.schema.names)


def _plain_array(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == pa.string_view():
        # A cast to text would fail for the whole column if one row is not UTF-8
        return column.cast(pa.binary_view()).cast(pa.binary()).view(pa.string())
    return column.cast(pa.binary()) if column.type == pa.binary_view() else column


def _plain(kind: pa.DataType) -> pa.DataType:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return views.get(kind, kind)


def _declared(kind: pa.DataType) -> pa.DataType:
    plain = _plain(kind)
    text = plain in (pa.string(), pa.large_string())
    return pa.dictionary(pa.int32(), plain) if text and pa.types.is_dictionary(kind) else plain


def _values(column: pa.Array) -> list[Any]:
    # Times finer than microseconds are truncated. Times outside of Python's range of years become text.
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
