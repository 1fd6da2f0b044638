"""CSV and TSV, plain or compressed, as RFC 4180 has it: a header, quotes doubled within quotes, newlines in quotes.

All values are text, as they stand in the file; an empty field is null. The header decides the delimiter: a comma,
else a semicolon, else a tab, whichever it holds first in this order; names that end in .tsv or .tab mean tabs.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.lines import (
    BATCH_BYTES,
    HashingFile,
    WholeLines,
    split_lines,
    unpacked_chunks,
    unpacked_name,
)
from batchinfer.data.input.protocol import BATCH_ROWS, Format, ReadOptions
from batchinfer.data.input.rows import RowBatch, RowProblem, Values, row_error
from batchinfer.errors import InputCorrupt, StorageError
from batchinfer.request import RowError

_TABS = (".tsv", ".tab")
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_OTHERWISE = "input.sql with read_csv reads files without a header and other dialects"

_UNFINISHED = "unexpected end of data"  # what csv says of a quote that is open where the lines end

Fields = list[str]


class CsvReader:
    """One CSV file. After `batches()` has ended, `sha256` identifies what was read."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._options = options
        self.sha256 = ""

    def schema(self) -> pa.Schema | None:
        """Text columns, named by the header; None for a file without a line. Raises InputCorrupt, StorageError."""
        with self._opened() as table:
            return None if table is None else pa.schema([(name, pa.string()) for name in table.names])

    def batches(self) -> Iterator[RowBatch]:
        """Rows in file order. A record that cannot be read costs its first line; blank lines are skipped."""
        with self._opened() as table:
            if table is not None:
                yield from self._grouped(table)
                self.sha256 = "" if table.head.cut else table.hashing.hexdigest()
        self._file.check_unchanged()

    @contextmanager
    def _opened(self) -> Iterator[_OpenTable | None]:
        """The header's names and the records below it; None for an empty file."""
        try:
            with open(self._file.path, "rb") as raw:
                hashing = HashingFile(raw)
                head = WholeLines(unpacked_chunks(self._file.path, raw, hashing), self._options.sample_bytes)
                cap = self._options.max_line_bytes
                lines = _RereadLines(split_lines(head, cap), cap)
                if lines.skip_blank():
                    records = _Records(self._file, lines, self._delimiter(lines), head)
                    yield _OpenTable(_names(self._file, records.header()), records, head, hashing)
                else:
                    self.sha256 = "" if head.cut else hashing.hexdigest()
                    yield None
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None

    def _delimiter(self, lines: _RereadLines) -> str:
        if unpacked_name(self._file.path).endswith(_TABS):
            return "\t"
        head = _QUOTED.sub("", lines.peek())
        return next((mark for mark in (",", ";", "\t") if mark in head), ",")

    def _grouped(self, table: _OpenTable) -> Iterator[RowBatch]:
        wanted = self._options.columns
        kept = [(at, name) for at, name in enumerate(table.names) if wanted is None or name in wanted]
        rows: list[Values | RowError] = []
        first = held = 0
        for number, fields, size in table.records:
            rows.append(self._row(number, fields, len(table.names), kept))
            held += size
            if len(rows) >= BATCH_ROWS or held >= BATCH_BYTES:
                yield self._batch(rows, first, kept, table.hashing)
                first, rows, held = first + len(rows), [], 0
        if rows:
            yield self._batch(rows, first, kept, table.hashing)

    def _row(
        self, number: int, fields: Fields | RowProblem, count: int, kept: list[tuple[int, str]]
    ) -> Values | RowError:
        if isinstance(fields, RowProblem):
            return self._error(number, fields.error.code, fields.error.message)
        if len(fields) != count:
            plural = "" if len(fields) == 1 else "s"
            return self._error(
                number, "bad_csv", f"{len(fields)} field{plural}, where the header has {count}"
            )
        return {name: fields[at] or None for at, name in kept}

    def _error(self, number: int, code: str, message: str) -> RowError:
        return row_error(code, f"{self._file.name} line {number}: {message}")

    def _batch(
        self, rows: list[Values | RowError], first: int, kept: list[tuple[int, str]], hashing: HashingFile
    ) -> RowBatch:
        names = [name for _, name in kept]
        values = [[None if isinstance(row, RowError) else row[name] for row in rows] for name in names]
        arrays = [pa.array(column, pa.string()) for column in values]
        table = pa.record_batch(arrays, names=names) if names else None
        return RowBatch(self._file.name, first, rows, table, hashing.bytes_read)


@dataclass(frozen=True, slots=True)
class _OpenTable:
    """An open file: its header and what reads the records below it."""

    names: Fields
    records: _Records
    head: WholeLines
    hashing: HashingFile


class _TooLong(Exception):
    """Raised out of csv's own loop: a line or a quoted field is over the limit."""


class _RereadLines:
    """Feeds the parser line by line and can go back: what was taken for a broken record is read again."""

    def __init__(self, numbered: Iterator[tuple[int, bytes | int]], cap: int) -> None:
        self._numbered = numbered
        self._cap = cap
        self._again: deque[tuple[int, bytes | int]] = deque()
        self._taken: list[tuple[int, bytes | int]] = []
        self._fresh = self._repeated = 0
        self.first = self.size = 0  # of the record at work: its line number and its bytes so far
        self.utf8 = True

    def __iter__(self) -> _RereadLines:
        return self

    def __next__(self) -> str:
        number, line = self._next()
        if not self._taken:
            self.first = number
        self._taken.append((number, line))
        if isinstance(line, int):
            raise _TooLong(f"the line has {line} bytes; the limit is {self._cap}")
        self.size += len(line) + 1
        if self.size > self._cap + 2:
            raise _TooLong(f"a quote is not closed within the limit of {self._cap} bytes")
        return self._text(line) + "\n"

    def _next(self) -> tuple[int, bytes | int]:
        if self._again:
            return self._again.popleft()
        number, line = next(self._numbered)
        self._fresh += line if isinstance(line, int) else len(line) + 1
        return number, line

    def _text(self, line: bytes) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            self.utf8 = False
            return line.decode("utf-8", "surrogateescape")

    def begin(self) -> None:
        """The next line begins a record."""
        self._taken, self.size, self.utf8 = [], 0, True

    def back(self) -> bool:
        """Go back to the line after the broken record's first; False when that is done too much.

        As much as was read anew may be read twice, so that quotes that never close cannot take for ever.
        """
        self._again.extendleft(reversed(self._taken[1:]))
        self._repeated += sum(len(line) for _, line in self._taken[1:] if isinstance(line, bytes))
        return self._repeated <= self._fresh + 4 * self._cap

    def skip_blank(self) -> bool:
        """Whether a line with content follows; blank ones before it are passed over."""
        for number, line in self._numbered:
            if isinstance(line, int) or line.strip():
                self._again.append((number, line))
                return True
        return False

    def peek(self) -> str:
        """The next line, which stays the next."""
        line = self._again[0][1] if self._again else b""
        return "" if isinstance(line, int) else self._text(line)


class _Records:
    """(line number, fields or what is wrong with them, bytes) of each record; blank lines are skipped."""

    def __init__(self, file: InputFile, lines: _RereadLines, delimiter: str, head: WholeLines) -> None:
        csv.field_size_limit(
            sys.maxsize
        )  # the limit is ours, on a whole record; csv knows only one for all readers
        self._file = file
        self._lines = lines
        self._head = head
        self._parser = csv.reader(lines, delimiter=delimiter, strict=True)

    def header(self) -> Fields:
        """The first record. Raises InputCorrupt when it cannot be read."""
        _, fields, _ = next(iter(self), (1, [], 0))
        if isinstance(fields, RowProblem):
            problem = fields.error.message
            raise InputCorrupt(f"{self._file.path}: the header in line {self._lines.first}: {problem}")
        return fields

    def __iter__(self) -> Iterator[tuple[int, Fields | RowProblem, int]]:
        while True:
            self._lines.begin()
            try:
                fields: Fields | RowProblem = next(self._parser)
            except StopIteration:
                return
            except (_TooLong, csv.Error) as error:
                if self._head.cut and _UNFINISHED in str(error):
                    return  # the rest of this record lies behind the cut
                fields = self._broken(error)
            if fields == []:
                continue
            if not isinstance(fields, RowProblem) and not self._lines.utf8:
                fields = RowProblem("bad_utf8", "a byte of this record is not UTF-8")
            yield self._lines.first, fields, self._lines.size

    def _broken(self, error: Exception) -> RowProblem:
        if not self._lines.back():
            raise InputCorrupt(
                f"{self._file.path}: line {self._lines.first}: too many quotes that nothing closes; "
                f"quotes within quotes are doubled in CSV ({_OTHERWISE})"
            )
        if isinstance(error, _TooLong):
            return RowProblem("line_too_long", str(error))
        return RowProblem("bad_csv", _said(str(error)))


def _said(error: str) -> str:
    """What csv complains of, for people."""
    if _UNFINISHED in error:
        return "a quote is opened that nothing closes"
    if "expected after" in error:
        return "a quoted field goes on after its closing quote; quotes within quotes are doubled"
    if "new-line character" in error:
        return "a carriage return stands alone outside of quotes"
    return error


def _names(file: InputFile, header: Fields) -> Fields:
    """The columns; one without a name is called by its place, as DuckDB does: column0."""
    if any("\r" in name for name in header):
        raise InputCorrupt(f"{file.path}: lines end with a carriage return alone; write it with newlines")
    names = [name or f"column{at}" for at, name in enumerate(header)]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InputCorrupt(
            f"{file.path}: the header names the column {twice[:100]!r} twice; the first line must name the "
            f"columns ({_OTHERWISE})"
        )
    return names


FORMAT = Format("csv", "CSV", (".csv", *_TABS), True, (), CsvReader, values_are_text=True)
