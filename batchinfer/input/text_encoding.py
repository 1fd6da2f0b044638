"""Decodes text files in other encodings than UTF-8, and reports invalid bytes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from batchinfer.core.errors import InputCorrupt
from batchinfer.input.rows import RowProblem

UTF8 = "utf-8"
UTF16 = frozenset({"utf-16", "utf-16-le", "utf-16-be"})


def as_utf8(path: str, chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Decode chunks of a text file from `encoding` and yield them as UTF-8.

    A byte that cannot be decoded becomes invalid UTF-8, so that only its row becomes an error row.

    Args:
        path: The path of the file, for messages.
        chunks: The bytes of the file.
        encoding: The encoding of the file. UTF-8 is passed on unchecked.

    Raises:
        InputCorrupt: The file ends in the middle of a character, or is not in the encoding.
    """
    if encoding == UTF8:
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)(
        "surrogatepass" if encoding in UTF16 else "surrogateescape"
    )
    try:
        for chunk in chunks:
            yield decoder.decode(chunk).encode(UTF8, "surrogatepass")
        yield decoder.decode(b"", True).encode(UTF8, "surrogatepass")
    except UnicodeError as error:
        advice = "; without a byte order mark it is utf-16-le or utf-16-be" if encoding == "utf-16" else ""
        raise InputCorrupt(
            f"{path}: is not {encoding}, as input.encoding says, or is cut short ({error}){advice}"
        ) from None


def decode_record(data: bytes, encoding: str, first_line: int | None = None) -> str:
    """Decode the bytes of a row, which are in UTF-8, and return the text.

    Args:
        data: The line or CSV record, as `as_utf8` yielded it.
        encoding: The encoding of the file, for messages.
        first_line: The number of the record's first line, for messages about records with several lines.

    Raises:
        RowProblem: A byte is invalid; the message names the byte and its line.
    """
    try:
        return data.decode(UTF8)
    except UnicodeDecodeError as error:
        raise _problem(data, error.start, encoding, first_line) from None


def _problem(data: bytes, at: int, encoding: str, first_line: int | None) -> RowProblem:
    above = data.count(b"\n", 0, at)
    where = f" of line {first_line + above}" if first_line is not None and above else " of the line"
    if encoding == UTF8:
        place = at - data.rfind(b"\n", 0, at)
        return RowProblem(
            "bad_utf8",
            f"byte {place}{where}, 0x{data[at]:02x}, is not UTF-8; if the file is in another encoding, name it: "
            "input.encoding: latin-1 (or cp1252, utf-16, shift_jis, …)",
        )
    code = ord(data[at : at + 3].decode(UTF8, "surrogatepass"))
    what = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else "half of a surrogate pair"
    return RowProblem("bad_encoding", f"{what}{where} is not {encoding}, which input.encoding names")
