"""Rows of formats that declare types (Parquet, Arrow): as Python sees them, cut small, dictionaries unpacked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa

from batchinfer.core.errors import InputCorrupt
from batchinfer.core.request import RowError
from batchinfer.input.chunk import InputChunk
from batchinfer.input.input_file import InputFile
from batchinfer.input.rows import Values, first_repeated, row_error
from batchinfer.input.unpacked import unpacked_size

_SLICE_BYTES = 4 << 20  # of one chunk, as long as it has more than one row


def declared_schema(path: str, schema: pa.Schema) -> pa.Schema:
    """The columns as results can have them, without metadata: views have the type of what they show, dictionaries of
    texts 32-bit indices and no order, as Parquet reads them back; other dictionaries have the type of their values.

    Raises InputCorrupt where two columns, or two fields of one struct, have one name, or one that is not UTF-8.
    """
    with names_in_utf8(path):
        _check_names(path, "columns", list(schema))
    return pa.schema([(f.name, _declared(f.type)) for f in schema])


@contextmanager
def names_in_utf8(path: str) -> Iterator[None]:
    """Raises InputCorrupt for a column's name that cannot be read inside."""
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
    """A dictionary where both have one, else its values. The columns must be the same: `check_same_schema`."""
    kinds = {field.name: field.type for field in other}
    fields = [f if f.type == kinds[f.name] else pa.field(f.name, _plain(f.type)) for f in one]
    return pa.schema(fields)


def check_same_schema(first: InputFile, schema: pa.Schema, other: InputFile, found: pa.Schema) -> None:
    """Raises InputCorrupt naming the first column that differs in name or type.

    Order does not matter, nor whether values are in a dictionary.
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
    """Return the rows of a small part; a row whose text is not UTF-8 will be an error row."""
    table = _unpacked(part)
    return TypedRows(file=file, bytes_read=bytes_read, most_rows=table.num_rows, first_row=first, table=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedRows(InputChunk):
    """Rows of a format with types: `table`, or on their way to another process an Arrow stream of it."""

    def packed(self) -> tuple[Self, bytes]:
        if self.table is None:
            raise ValueError("rows that are packed already")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as stream:
            stream.write_batch(self.table)
        return replace(self, table=None), sink.getvalue().to_pybytes()

    def unpacked(self, data: bytes) -> Self:
        with pa.ipc.open_stream(data) as stream:
            return replace(self, table=stream.read_next_batch())

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        if self.table is None:
            raise ValueError("rows that are packed")
        part = self.table.slice(start, None if stop is None else stop - start)
        return iter(_checked_rows(self.file, part, values))


def _checked_rows(
    file: str, part: pa.RecordBatch, values: Collection[str] | None
) -> Sequence[Values | RowError]:
    """Return the rows with these columns; None: with all."""
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
        return _rows_apart(file, part)
    names = part.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * part.num_rows


def _rows_apart(file: str, part: pa.RecordBatch) -> list[Values | RowError]:
    """One row after the other, so that the row that is not UTF-8 costs itself only."""
    if part.num_rows > 1:
        return [row for i in range(part.num_rows) for row in _rows(file, part.slice(i, 1))]
    return [row_error("bad_utf8", f"{file}: a text column of this row is not UTF-8")]


def blanked(part: pa.RecordBatch, bad: Collection[int]) -> pa.RecordBatch:
    """Return the same rows, those whose numbers are in `bad` null in every column."""
    return part.take(pa.array([None if at in bad else at for at in range(part.num_rows)], pa.int64()))


def sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halved until each part, unpacked, is small or a single row."""
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or unpacked_size(batch) <= _SLICE_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from sliced(batch.slice(0, half))
    yield from sliced(batch.slice(half))


def put_together(parts: Iterable[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """Put small parts that follow one another together, as far as they stay small and have at most `most` rows."""
    held, rows, taken = list[pa.RecordBatch](), 0, 0
    for part in parts:
        part_bytes = unpacked_size(part)
        if held and (rows + part.num_rows > most or taken + part_bytes > _SLICE_BYTES):
            yield _joined(held)
            held, rows, taken = [], 0, 0
        held.append(part)
        rows, taken = rows + part.num_rows, taken + part_bytes
    if held:
        yield _joined(held)


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches([_unpacked(one) for one in parts])


def _unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [_plain_array(column) for column in batch.columns]
    return pa.record_batch(arrays, names=batch.schema.names)


def _plain_array(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == pa.string_view():
        return (
            column.cast(pa.binary_view()).cast(pa.binary()).view(pa.string())
        )  # UTF-8 is checked row by row
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
    """Return the values as Python's. Finer times are cut to microseconds; times beyond Python's years become text."""
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
