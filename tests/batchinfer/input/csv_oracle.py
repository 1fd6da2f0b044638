"""Parses a file with Python's csv module, record by record, as a slow and independent reference."""

from __future__ import annotations

import csv
import itertools
import random
import sys
from collections.abc import Iterator

from batchinfer.input.formats.csv_dialect import CsvDialect
from batchinfer.input.formats.csv_records import CsvRecords
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.rows import RowProblem

Row = tuple[int, list[str] | str]  # line number; the fields, or the code of an error


class _TooLong(Exception):
    pass


def expected(data: bytes, dialect: CsvDialect, cap: int) -> list[Row]:
    """Return the rows. A record that cannot be parsed costs its first line. Blank lines are skipped."""
    csv.field_size_limit(sys.maxsize)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows: list[Row] = []
    at = 0
    while at < len(lines):
        found, used = _record(lines[at:], dialect, cap)
        if found != []:
            rows.append((at + 1, found))
        at += used
    return rows


def _record(lines: list[bytes], dialect: CsvDialect, cap: int) -> tuple[list[str] | str, int]:
    """Return the first record of these lines, and the number of lines that it takes."""
    quoting = csv.QUOTE_NONE if dialect.quote is None else csv.QUOTE_MINIMAL
    parser = csv.reader(
        _fed(lines, cap), delimiter=dialect.delimiter, quotechar=dialect.quote, quoting=quoting, strict=True
    )
    try:
        return next(parser), parser.line_num
    except _TooLong:
        return "line_too_long", 1
    except csv.Error:
        return "bad_csv", 1


def _fed(lines: list[bytes], cap: int) -> Iterator[str]:
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > cap + 2:
            raise _TooLong
        yield line.decode("utf-8", "surrogateescape") + "\n"


def found(chunks: Iterator[bytes], dialect: CsvDialect, cap: int) -> list[Row]:
    """Return the rows that our own reader finds in these chunks of bytes."""
    rows: list[Row] = []
    for number, record, _ in CsvRecords(LineBuffer(chunks), dialect, cap, lambda: False):
        if isinstance(record, RowProblem):
            rows.append((number, record.error.code))
        else:
            text = record.decode("utf-8", "surrogateescape")
            fields = dialect.split(text)
            assert dialect.count(text) == len(fields)
            rows.append((number, fields))
    return rows


def drawn(source: random.Random) -> tuple[bytes, CsvDialect, int]:
    """Draw a file that consists mostly of delimiters and quotes, its dialect, and the limit of a record."""
    delimiter, quote = source.choice(
        [(",", '"'), (";", '"'), ("\t", "'"), ("|", None), ("^", "]"), ("\\", "-")]
    )
    mark = (quote or '"').encode()
    alphabet = [b"a", b"\xc3\xbc", b" ", b"\n", b"\r\n", b"\r", delimiter.encode(), mark, mark, mark * 2]
    weights = [source.choice([0, 1, 3]) + 1e-9 for _ in alphabet]
    data = b"".join(source.choices(alphabet, weights, k=source.randrange(60)))
    return data, CsvDialect(delimiter, quote), source.choice([4, 10, 30, 10**6])


def splits(data: bytes, source: random.Random) -> Iterator[list[bytes]]:
    """Yield the bytes whole, byte by byte, split in two at every offset, and split at random."""
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    places = sorted(source.choices(range(len(data) + 1), k=5))
    yield [data[a:b] for a, b in itertools.pairwise([0, *places, len(data)])]
