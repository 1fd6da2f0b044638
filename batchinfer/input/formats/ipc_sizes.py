"""Reads the sizes of the record batches of an Arrow IPC stream from their headers, before anything is decompressed.

A message is: 0xFFFFFFFF, the length of its header, the header (a FlatBuffer), the body. These fields are read:

    Message {version: i16, header_type: u8, header: union, bodyLength: i64}
    RecordBatch {length: i64, nodes: [FieldNode], buffers: [{offset: i64, length: i64}], compression: table}
    DictionaryBatch {id: i64, data: RecordBatch}

A compressed buffer begins with its uncompressed length (i64; -1: the buffer is not compressed).

pyarrow decompresses a batch before it returns its size, so it cannot do this check. A memory limit on the process would
not do either: it would end the run instead of rejecting one file by name.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

from batchinfer.input.decompression import ROW_BYTES

_CONTINUED = 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3  # values of header_type
_MOST_HEADER = 64 << 20  # maximum bytes of a header; a buffer takes 24, so real tables are far below


class BadMessage(Exception):
    """Raised for an Arrow stream that is truncated or damaged, or for data that is not an Arrow stream."""


def batch_sizes(raw: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the sizes of each record batch and dictionary batch of a stream, as (stored bytes, uncompressed bytes).

    Only the headers of the batches are read, so a decompression bomb can be detected before it is decompressed.

    Raises:
        BadMessage: The stream is damaged.
    """
    end = os.fstat(raw.fileno()).st_size
    while (size := _header_size(raw, end)) > 0:
        header = _Flat(_exactly(raw, size))
        try:
            message = header.root()
            body = header.number(message, 3, "<q")
            holds = header.number(message, 1, "<B")
            compressed, uncompressed = _sizes(raw, header, message, holds)
        except (struct.error, IndexError, ValueError) as error:
            raise BadMessage(f"a message's header is damaged: {error}") from None
        start = raw.tell()
        if body < 0 or start + body > end:
            raise BadMessage(f"a message of {body} bytes, but only {end - start} bytes follow")
        if holds in (_DICTIONARY, _RECORDS):
            yield compressed, max(uncompressed, body)
        raw.seek(start + body)


def _header_size(raw: BinaryIO, end: int) -> int:
    head = raw.read(8)
    if not head or head == b"\xff\xff\xff\xff\0\0\0\0":
        return 0
    if len(head) < 8:
        raise BadMessage("cut short between two messages")
    mark, size = struct.unpack("<Ii", head)
    if mark != _CONTINUED:
        raise BadMessage("no Arrow stream, or one by an Arrow older than 0.15")
    if not 0 < size <= min(_MOST_HEADER, end - raw.tell()):
        raise BadMessage(f"a header of {size} bytes")
    return int(size)


def _exactly(raw: BinaryIO, size: int) -> bytes:
    data = raw.read(size)
    if len(data) < size:
        raise BadMessage("cut short within a header")
    return data


def _sizes(raw: BinaryIO, header: _Flat, message: int, holds: int) -> tuple[int, int]:
    if holds not in (_DICTIONARY, _RECORDS):
        return 0, 0
    batch = header.table(message, 2)
    if holds == _DICTIONARY:
        batch = header.table(batch, 1)
    has_compression = header.place(batch, 3) is not None
    rows = header.number(batch, 0, "<q")
    start, compressed, uncompressed = raw.tell(), 0, 0
    for offset, length in header.pairs(batch, 2):
        compressed += length
        uncompressed += _declared(raw, start + offset, length) if has_compression and length else length
    raw.seek(start)
    return compressed, max(uncompressed, rows * ROW_BYTES)


def _declared(raw: BinaryIO, at: int, length: int) -> int:
    raw.seek(at)
    declared = int(struct.unpack("<q", _exactly(raw, 8))[0])
    return length if declared < 0 else declared


class _Flat:
    """A reader of the fields of a FlatBuffer, the format of Arrow's headers. Positions are byte offsets in the buffer.

    A position outside of the buffer raises struct.error.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def root(self) -> int:
        return self._at(0, "<I")

    def place(self, table: int, field: int) -> int | None:
        """Return the position of a field of a FlatBuffer's table.

        None if the field is absent, since it has its default.

        Args:
            table: The position of the table.
            field: The number of the field in the table's schema.
        """
        vtable = table - self._at(table, "<i")
        slot = 4 + 2 * field
        if slot + 2 > self._at(vtable, "<H"):
            return None
        offset = self._at(vtable + slot, "<H")
        return table + offset if offset else None

    def number(self, table: int, field: int, kind: str) -> int:
        """Return the value of a numeric field of a FlatBuffer's table, or 0 if the field is absent.

        Args:
            table: The position of the table.
            field: The number of the field in the table's schema.
            kind: The field's format for `struct`, such as "<q".
        """
        place = self.place(table, field)
        return 0 if place is None else self._at(place, kind)

    def table(self, table: int, field: int) -> int:
        """Return the position of the table or vector that a field of a FlatBuffer's table points at.

        Args:
            table: The position of the table with the field.
            field: The number of the field in the table's schema.

        Raises:
            IndexError: The field is absent.
        """
        place = self.place(table, field)
        if place is None:
            raise IndexError("a table is missing")
        return place + self._at(place, "<I")

    def pairs(self, table: int, field: int) -> Iterator[tuple[int, int]]:
        """Yield the elements of a field of a FlatBuffer's table that is a vector of pairs of 64-bit integers.

        Args:
            table: The position of the table.
            field: The number of the field in the table's schema.
        """
        if self.place(table, field) is None:
            return
        vector = self.table(table, field)
        for at in range(self._at(vector, "<I")):
            yield self._at(vector + 4 + 16 * at, "<q"), self._at(vector + 12 + 16 * at, "<q")

    def _at(self, place: int, kind: str) -> int:
        if place < 0:
            raise IndexError("it points before its start")
        return int(struct.unpack_from(kind, self._data, place)[0])
