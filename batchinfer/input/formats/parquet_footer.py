"""Reads the column chunks from a Parquet footer, and the number of values in a chunk's dictionary.

pyarrow's metadata objects abort the process if a footer is damaged, because their C++ exceptions pass through code
that must not throw. A footer is a struct in Thrift's compact protocol. These fields are read:

    FileMetaData {4: [RowGroup {1: [ColumnChunk {3: ColumnMetaData}]}]}
    ColumnMetaData {1: type, 2: [encoding], 5: num_values, 6: total_uncompressed_size, 7: total_compressed_size,
                    9: data_page_offset, 11: dictionary_page_offset}
    PageHeader     {1: type, 7: DictionaryPageHeader {1: num_values}}
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_TAIL = 8  # the footer's length and the magic
_MOST_FOOTER = 64 << 20  # maximum bytes of a footer; a chunk takes about 100, so real tables are far below
_DEEPEST = 32
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_LISTS = (9, 10)
_DICTIONARIES = (2, 8)  # PLAIN_DICTIONARY, RLE_DICTIONARY
_DICTIONARY_PAGE = 2
_PAGE_HEADER = 64 << 10  # bytes to read for a page header; it may include statistics with texts
BYTE_ARRAY = 6


class BadFooter(Exception):
    """Raised if the footer of a Parquet file is damaged or far too large."""


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column chunk (the values of one column in one row group) as the footer of a Parquet file describes it.

    Args:
        group: The number of its row group, from 0.
        column: The number of its column among all leaf columns, from 0.
        kind: The physical type of its values: the number in Parquet's enum `Type`.
        dictionary: True if values are dictionary-encoded.
        values: The number of values.
        uncompressed: The uncompressed size in bytes.
        compressed: The compressed size in bytes.
        start: The position of its first page in the file.
    """

    group: int
    column: int
    kind: int
    dictionary: bool
    values: int
    uncompressed: int
    compressed: int
    start: int


def column_chunks(raw: BinaryIO) -> list[ColumnChunk]:
    """Return all column chunks in the footer of a Parquet file. Raises BadFooter."""
    size = raw.seek(0, os.SEEK_END)
    raw.seek(max(0, size - _TAIL))
    length = int.from_bytes(raw.read(4), "little")
    if length > min(_MOST_FOOTER, size - _TAIL):
        raise BadFooter(f"a footer of {length:,} bytes; at most {_MOST_FOOTER:,} are read")
    raw.seek(size - _TAIL - length)
    try:
        return list(_chunks(_Compact(raw.read(length))))
    except (IndexError, RecursionError) as error:
        raise BadFooter(str(error)) from None


def dictionary_values(raw: BinaryIO, chunk: ColumnChunk) -> int | None:
    """Return the number of values in a column chunk's dictionary, from the header of the chunk's first page.

    Returns:
        None if the first page is not a dictionary, or its header is damaged.
    """
    raw.seek(max(0, chunk.start))
    data, kind = _Compact(raw.read(_PAGE_HEADER)), -1
    try:
        for number, form in data.fields():
            if number == 1:
                kind = data.signed()
            elif number == 7 and form == _STRUCT and kind == _DICTIONARY_PAGE:
                return _first_number(data)
            else:
                data.skip(form)
    except (IndexError, RecursionError, BadFooter):
        return None
    return None


def _first_number(data: _Compact) -> int | None:
    for number, form in data.fields():
        if number == 1 and form in (4, 5, 6):
            return data.signed()
        data.skip(form)
    return None


def _chunks(data: _Compact) -> Iterator[ColumnChunk]:
    for number, kind in data.fields():
        if number != 4 or kind not in _LISTS:
            data.skip(kind)
            continue
        for group in range(data.list_size(_STRUCT)):
            yield from _of_group(data, group)


def _of_group(data: _Compact, group: int) -> Iterator[ColumnChunk]:
    for number, kind in data.fields():
        if number != 1 or kind not in _LISTS:
            data.skip(kind)
            continue
        for column in range(data.list_size(_STRUCT)):
            for inner, inner_kind in data.fields():
                if inner == 3 and inner_kind == _STRUCT:
                    yield _chunk(data, group, column)
                else:
                    data.skip(inner_kind)


def _chunk(data: _Compact, group: int, column: int) -> ColumnChunk:
    found = {1: -1, 5: 0, 6: 0, 7: 0, 9: 0, 11: 0}
    dictionary = False
    for number, kind in data.fields():
        if number in found and kind in (4, 5, 6):
            found[number] = data.signed()
        elif number == 2 and kind in _LISTS:
            encodings = [data.signed() for _ in range(data.list_size(5))]
            dictionary = any(one in _DICTIONARIES for one in encodings)
        else:
            data.skip(kind)
    start = found[11] if 0 < found[11] < found[9] else found[9]  # as Arrow reads it
    return ColumnChunk(group, column, found[1], dictionary, found[5], found[6], found[7], start)


class _Compact:
    """A reader of Thrift's compact protocol, the format of Parquet's footer. It reads at its current position.

    Raises IndexError at the end of the data, and BadFooter for damaged data.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the (field number, type) of each field of a Thrift struct at the current position.

        The caller must read or skip the value of a field before it asks for the next field.
        """
        number = 0
        while head := self._byte():
            delta = head >> 4
            number = number + delta if delta else self.signed()
            yield number, head & 15

    def list_size(self, wanted: int | None = None) -> int:
        """Read the start of a Thrift list at the current position, and return its number of values.

        Args:
            wanted: The type that the values must have, else BadFooter is raised. None for any type.
        """
        head = self._byte()
        size, kind = head >> 4, head & 15
        if wanted is not None and kind != wanted and size:
            raise BadFooter(f"a list of type {kind}")
        size = self._varint() if size == 15 else size
        if size > len(self._data) - self._at:
            raise BadFooter(f"a list of {size} values")
        return size

    def signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a Thrift value at the current position.

        Args:
            kind: The type of the value.
            depth: The number of structs and lists around it. A value that is nested too deeply raises BadFooter.
        """
        if depth > _DEEPEST:
            raise BadFooter("it nests too deeply")
        if kind == _BYTE:
            self._at += 1
        elif kind in (4, 5, 6):
            self._varint()
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BINARY:
            length = self._varint()  # not inline, since the call changes `_at`
            self._at += length
        elif kind in _LISTS:
            self._skip_list(depth)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind not in (_TRUE, _FALSE):
            raise BadFooter(f"a value of type {kind}")

    def _skip_list(self, depth: int) -> None:
        kind = self._data[self._at] & 15
        for _ in range(self.list_size()):
            self.skip(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise BadFooter("a number of more than 64 bits")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]
