"""Decompresses, hashes and splits text files in bounded memory, however long a line is."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from batchinfer.core.errors import InputCorrupt
from batchinfer.input.chunk import ChunkSize
from batchinfer.input.decompression import is_bomb, refuse_bomb
from batchinfer.input.format import CODECS, MAGIC
from batchinfer.input.input_file import InputFile
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.text_encoding import UTF8, UTF16, as_utf8

_CHUNK = 1 << 18
_BOM = b"\xef\xbb\xbf"


class HashingFile(io.RawIOBase):
    """A file that computes the SHA-256 of its bytes while they are read, which saves a second pass over the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes_read = 0

    def readable(self) -> bool:
        """Return True, since the file can be read."""
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        """Read up to the length of `buffer` bytes into it, and return the number of bytes read."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.bytes_read += len(data)
        return len(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of the whole file as hex digits.

        Bytes that were not read through this object yet, such as bytes after compressed data, are read from the file
        first.
        """
        while chunk := self._file.read(_CHUNK):
            self._digest.update(chunk)
            self.bytes_read += len(chunk)
        return self._digest.hexdigest()


def uncompressed_chunks(
    file: InputFile, raw: BinaryIO, hashing: HashingFile, encoding: str = UTF8
) -> Iterator[bytes]:
    """Yield the decompressed text of a file as UTF-8 without a byte order mark, in chunks of about 256 KiB.

    Args:
        file: The file, for its size and for messages.
        raw: The opened file, to look at its first bytes.
        hashing: A HashingFile over `raw`, through which the text is read, so that the whole file is hashed.
        encoding: The encoding of the text in the file.
    """
    chunks = as_utf8(file.path, _uncompressed(file, raw, hashing, encoding), encoding)
    head = next(chunks, b"")
    yield head[len(_BOM) :] if head.startswith(_BOM) else head
    yield from chunks


def _uncompressed(file: InputFile, raw: BinaryIO, hashing: HashingFile, encoding: str) -> Iterator[bytes]:
    codec = _codec(file.path, raw.read(4))
    raw.seek(0)
    reader = hashing.read if codec is None else _Decompressing(file, hashing, codec)
    head = reader(_CHUNK) or b""
    if encoding not in UTF16:
        _refuse_utf16(file.path, head)
    yield head
    while chunk := reader(_CHUNK):
        yield chunk


class _Decompressing:
    def __init__(self, file: InputFile, hashing: HashingFile, codec: str) -> None:
        self._path, self._compressed = file.path, file.size
        self._codec = codec
        self._produced = 0
        self._stream = pa.CompressedInputStream(pa.PythonFile(hashing, mode="r"), codec)

    def __call__(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except OSError as error:
            raise InputCorrupt(
                f"{self._path}: damaged {self._codec} data after {self._produced} decompressed bytes: {error}; "
                "the file is truncated or was changed in transfer"
            ) from None
        self._produced += len(data)
        if is_bomb(self._compressed, self._produced):
            refuse_bomb(self._path, self._compressed, self._produced)
        return data


def _codec(path: str, head: bytes) -> str | None:
    for magic, codec in MAGIC.items():
        if head.startswith(magic):
            return codec
    promised = next((codec for suffix, codec in CODECS.items() if path.lower().endswith(suffix)), None)
    if promised and head:
        raise InputCorrupt(f"{path}: the name says {promised}, the content is not {promised}")
    return None


def _refuse_utf16(path: str, head: bytes) -> None:
    start = head[:4]
    marked = start[:2] in (b"\xff\xfe", b"\xfe\xff")
    unmarked = len(start) >= 2 and (start[0] == 0) != (start[1] == 0)
    if marked or unmarked:
        raise InputCorrupt(
            f"{path}: the text is UTF-16 or UTF-32; name it (input.encoding: utf-16), or write it as UTF-8 "
            "(iconv -f UTF-16 -t UTF-8)"
        )


class WholeLines:
    """Iterates over a text file, or over a sample from its start, in chunks of whole lines.

    Args:
        chunks: The bytes of the file, in chunks of any size.
        most: The approximate number of bytes to yield, or None for the whole file.

    Attributes:
        truncated: True after the iteration if the file goes on after the sample.
    """

    def __init__(self, chunks: Iterator[bytes], most: int | None) -> None:
        self._chunks = chunks
        self._most = most
        self.truncated = False

    def __iter__(self) -> Iterator[bytes]:
        if self._most is None:
            yield from self._chunks
            return
        left, line = self._most, b""  # `line` is the start of an unfinished line
        for chunk in self._chunks:
            line += chunk
            end = line.rfind(b"\n") + 1
            yield line[:end]
            line = line[end:]
            if len(chunk) >= left:
                self.truncated = True
                return
            left -= len(chunk)
        yield line


def line_blocks(lines: LineBuffer, cap: int, size: ChunkSize) -> Iterator[tuple[int, bytes | int]]:
    """Yield blocks of whole lines of a text file, as (number of the block's first line, bytes of the block).

    A line that is too long is skipped. It is yielded as (its number, its length in bytes).

    Args:
        lines: The buffered file.
        cap: The maximum length of a line in bytes.
        size: The maximum size of a block.
    """
    while (end := lines.line_end(cap + 1)) is not None:
        number = lines.number
        if end < 0:
            yield number, lines.skip_line()
            continue
        lines.look_ahead(size.bytes)
        stop = lines.block_end(size.bytes, size.lines) or end + 1
        yield number, lines.take(stop, stop)
