"""JSON lines, plain or compressed, read in bounded memory however long a line is."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from batchinfer.data.files import InputFile
from batchinfer.data.json_text import parse_row
from batchinfer.data.rows import RowBatch, RowProblem, Values, row_error
from batchinfer.errors import InputCorrupt, StorageError
from batchinfer.request import RowError

_CHUNK = 1 << 18
_BATCH_ROWS = 512
_BATCH_BYTES = 1 << 20  # of lines: what one batch may hold beyond its last line
_BOM = b"\xef\xbb\xbf"
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_SUFFIX = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


class HashingFile(io.RawIOBase):
    """Passes a file's bytes through and hashes them, so that one pass reads and identifies."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.bytes_read += len(data)
        return len(data)

    def hexdigest(self) -> str:
        """Of the whole file: what a decompressor left unread is read here."""
        while chunk := self._file.read(_CHUNK):
            self._digest.update(chunk)
            self.bytes_read += len(chunk)
        return self._digest.hexdigest()


class JsonlReader:
    """One JSONL file. After `batches()` has ended, `sha256` identifies what was read."""

    def __init__(self, file: InputFile, max_line_bytes: int) -> None:
        self._file = file
        self._cap = max_line_bytes
        self.sha256 = ""

    def batches(self) -> Iterator[RowBatch]:
        """Rows in file order; blank lines are skipped. Raises InputCorrupt when the file is damaged or changes."""
        try:
            with open(self._file.path, "rb") as raw:
                hashing = HashingFile(raw)
                yield from self._grouped(self._lines(_chunks(self._file.path, raw, hashing)), hashing)
                self.sha256 = hashing.hexdigest()
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
        self._file.check_unchanged()

    def _grouped(self, lines: Iterator[tuple[int, bytes | int]], hashing: HashingFile) -> Iterator[RowBatch]:
        rows: list[Values | RowError] = []
        first = held = 0
        for number, line in lines:
            rows.append(self._row(number, line))
            held += len(line) if isinstance(line, bytes) else 0
            if len(rows) >= _BATCH_ROWS or held >= _BATCH_BYTES:
                yield RowBatch(self._file.name, first, rows, None, hashing.bytes_read)
                first, rows, held = first + len(rows), [], 0
        if rows:
            yield RowBatch(self._file.name, first, rows, None, hashing.bytes_read)

    def _row(self, number: int, line: bytes | int) -> Values | RowError:
        try:
            if isinstance(line, int):
                raise RowProblem("line_too_long", f"the line has {line} bytes; the limit is {self._cap}")
            return parse_row(line)
        except RowProblem as problem:
            error = problem.error
            return row_error(error.code, f"{self._file.name} line {number}: {error.message}")

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes | int]]:
        """(line number, line) without blank lines; a line over the cap is only measured: (number, its length)."""
        number, tail, dropped = 1, b"", 0
        for chunk in chunks:
            pieces = chunk.split(b"\n")
            for piece in pieces[:-1]:
                if dropped or len(tail) + len(piece) > self._cap + 1:  # one more, for a carriage return
                    yield number, dropped + len(tail) + len(piece)
                elif line := (tail + piece).strip(b" \t\r"):
                    yield number, line
                number, tail, dropped = number + 1, b"", 0
            tail += pieces[-1]
            if len(tail) > self._cap + 1:
                tail, dropped = b"", dropped + len(tail)
        if dropped:
            yield number, dropped + len(tail)
        elif line := tail.strip(b" \t\r"):
            yield number, line


def _chunks(path: str, raw: BinaryIO, hashing: HashingFile) -> Iterator[bytes]:
    """Decompressed bytes without a byte order mark, 256 KiB at a time."""
    codec = _codec(path, raw.read(4))
    raw.seek(0)
    reader = hashing.read if codec is None else _Decompressing(path, hashing, codec)
    head = reader(_CHUNK) or b""
    _refuse_utf16(path, head)
    yield head[len(_BOM) :] if head.startswith(_BOM) else head
    while chunk := reader(_CHUNK):
        yield chunk


class _Decompressing:
    """`read` over a compressed stream; damage becomes InputCorrupt with the place. Reads multi-member files."""

    def __init__(self, path: str, hashing: HashingFile, codec: str) -> None:
        self._path = path
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
        return data


def _codec(path: str, head: bytes) -> str | None:
    """By the file's first bytes; a suffix that promises compression which is not there is damage."""
    for magic, codec in _MAGIC.items():
        if head.startswith(magic):
            return codec
    promised = next((codec for suffix, codec in _SUFFIX.items() if path.lower().endswith(suffix)), None)
    if promised and head:
        raise InputCorrupt(f"{path}: the name says {promised}, the content is not {promised}")
    return None


def _refuse_utf16(path: str, head: bytes) -> None:
    start = head[:4]
    marked = start[:2] in (b"\xff\xfe", b"\xfe\xff")
    unmarked = len(start) >= 2 and (start[0] == 0) != (start[1] == 0)
    if marked or unmarked:
        raise InputCorrupt(
            f"{path}: the text is UTF-16 or UTF-32; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
