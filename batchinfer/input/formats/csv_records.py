"""Splits CSV into records in linear time and bounded memory, however malformed it is.

A record crosses the end of a line only inside quotes. All records that cross the same line end are therefore in the
same state there, and end alike: if a quote opened in line 5 is never closed, one opened in line 6 is not closed
either. `_OpenQuote` scans the file once for all records that start within its lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from batchinfer.input.chunk import ChunkSize
from batchinfer.input.formats.csv_dialect import CsvDialect
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.rows import RowProblem

_LINE_END = 2  # bytes of a carriage return and a newline, which do not count towards the limit of a record

Found = tuple[int, bytes | RowProblem, int]  # line number, record without its line end, size in bytes
Fault = Literal["open", "junk", "return", "never"]

_FAULT_MESSAGES: dict[Fault, str] = {
    "junk": "a quoted field goes on after its closing quote; quotes within quotes are doubled",
    "return": "there is a carriage return without a newline outside of quotes",
    "never": "a quote is opened and never closed",
}


class CsvRecords:
    """Iterates over the records of a CSV file, without blank lines.

    Yields (number of the record's first line, its bytes without the line end, its size in bytes). For a malformed
    record, there is a RowProblem in place of the bytes, and the next line starts a new record.

    Args:
        lines: The buffered file.
        dialect: The delimiter and the quote character.
        cap: The maximum length of a record in bytes.
        is_truncated: Returns True if only a sample of the file is read, and the file goes on after `lines`. An
            unfinished last record is then dropped.
    """

    def __init__(
        self, lines: LineBuffer, dialect: CsvDialect, cap: int, is_truncated: Callable[[], bool]
    ) -> None:
        self._lines, self._dialect, self._cap, self._is_truncated = lines, dialect, cap, is_truncated
        self._mark = None if dialect.quote is None else dialect.quote.encode()
        self._open: _OpenQuote | None = None

    def __iter__(self) -> Iterator[Found]:
        while (end := self._lines.line_end(self._cap + 1)) is not None:
            yield from self._next(end)

    def first(self) -> Found | None:
        """Return the next record: the header of the file. Blank lines before it must have been skipped."""
        end = self._lines.line_end(self._cap + 1)
        return None if end is None else self._one(end)

    def blocks(self, size: ChunkSize) -> Iterator[tuple[int, bytes] | list[Found]]:
        """Yield all records of the file in blocks: (number of the first line, whole records as unparsed lines).

        If the end of a block cannot be found quickly, for example because a record is malformed, a list of single
        records is yielded instead.

        Args:
            size: The maximum size of a block.
        """
        lines = self._lines
        while lines.line_end(self._cap + 1) is not None:
            lines.look_ahead(size.bytes)
            look_ahead_end, stop = lines.at + size.bytes, self._block_end(size)
            if stop > lines.at:
                yield lines.number, lines.take(stop, stop)
            else:
                yield list(self._until(look_ahead_end))

    def _block_end(self, size: ChunkSize) -> int:
        lines = self._lines
        stop = lines.block_end(size.bytes, size.lines) or lines.at
        start, data = lines.at - lines.base, lines.data
        if self._mark is None or data.find(self._mark, start, stop - lines.base) < 0:
            return stop
        if self._cap < size.bytes:  # of a record over the limit, only the first line is an error
            return lines.at
        found = self._dialect.records.match(data, start, stop - lines.base)
        return lines.at if found is None else lines.base + found.end()

    def _until(self, stop: int) -> Iterator[Found]:
        while self._lines.at < stop and (end := self._lines.line_end(self._cap + 1)) is not None:
            yield from self._next(end)

    def _next(self, end: int) -> Iterator[Found]:
        lines = self._lines
        if (plain := lines.lines_without(self._mark)) > lines.at and end >= 0:
            yield from self._plain(lines.number, lines.take(plain, plain))
        elif (found := self._one(end)) is not None:
            yield found

    def _plain(self, first: int, block: bytes) -> Iterator[Found]:
        for number, line in enumerate(block.split(b"\n"), first):
            size, line = len(line) + 1, line.rstrip(b"\r")
            if size > self._cap + _LINE_END:
                yield number, self._line_too_long(size - 1), 0
            elif b"\r" in line:
                yield number, RowProblem("bad_csv", _FAULT_MESSAGES["return"]), size
            elif line:
                yield number, line, size

    def _one(self, end: int) -> Found | None:
        # None: the line is blank, or the record continues after the end of a sample
        lines, number = self._lines, self._lines.number
        if end < 0:
            return number, self._line_too_long(lines.skip_line()), 0
        size = end + 1 - lines.at
        stop, fault = _match_fields(self._dialect, lines, self._dialect.record, lines.at, end)
        if fault == "open":
            return self._long(number, end)
        empty, record = stop == lines.at, lines.take(stop, end + 1)
        if fault is not None:
            return number, RowProblem("bad_csv", _FAULT_MESSAGES[fault]), size
        return None if empty else (number, record, size)

    def _long(self, number: int, end: int) -> Found | None:
        # None: the record continues after the end of a sample
        lines, limit = self._lines, self._cap + _LINE_END
        # A record whose quote is open at the same line end as an earlier record's ends like that record
        if self._open is None or not self._open.is_open_at(end):
            self._open = _OpenQuote(self._dialect, end + 1)
        fate, size = self._open.walk(lines, limit), self._open.at - lines.at
        if fate is None or size > limit:
            message = f"a quote is not closed within the limit of {self._cap} bytes"
            problem = RowProblem("line_too_long", message)
        elif fate == "closed":
            return number, lines.take(self._open.stop, self._open.at), size
        elif fate == "never" and self._is_truncated():
            lines.take(lines.at, lines.end)
            return None
        else:
            problem = RowProblem("bad_csv", _FAULT_MESSAGES[fate])
        first = end + 1 - lines.at
        lines.take(lines.at, end + 1)
        return number, problem, first

    def _line_too_long(self, length: int) -> RowProblem:
        return RowProblem("line_too_long", f"the line has {length} bytes; the limit is {self._cap}")


class _OpenQuote:
    # Searches for the end of a CSV record whose quote is open at the end of a line
    def __init__(self, dialect: CsvDialect, at: int) -> None:
        self._dialect = dialect
        self._fate: Fault | Literal["closed"] | None = None
        self.at = self.stop = at

    def is_open_at(self, end: int) -> bool:
        """Return True if the record's quoted field is still open at the line end at position `end` of the file."""
        return self._fate == "never" or self.at > end + 1 or (self._fate is None and self.at == end + 1)

    def walk(self, lines: LineBuffer, limit: int) -> Fault | Literal["closed"] | None:
        """Scan for the end of a CSV record whose quote is open.

        Args:
            lines: The buffered file. The record starts at its reading position.
            limit: The maximum length of the record in bytes.

        Returns:
            "closed" for a valid record, else what is wrong with the record, such as "never" if the quote is never
            closed. None if the record does not end within `limit` bytes.
        """
        while self._fate is None and self.at - lines.at <= limit:
            if self.at < lines.whole:
                self._step(lines)
            elif lines.end - lines.at > limit:
                return None
            elif not lines.fill():
                self._fate, self.at = "never", lines.end + (not lines.data.endswith(b"\n"))
        return self._fate

    def _step(self, lines: LineBuffer) -> None:
        data, base, whole = lines.data, lines.base, lines.whole - lines.base
        closing = self._dialect.within.match(data, self.at - base, whole)
        if closing is None or closing.end() == whole:
            self.at = lines.whole
            return
        end = data.find(b"\n", closing.end(), whole)
        end = whole if end < 0 else end
        stop, fault = _match_fields(
            self._dialect, lines, self._dialect.rest, base + closing.end() + 1, base + end
        )
        self.at, self.stop = base + end + 1, stop
        if fault != "open":
            self._fate = fault or "closed"


def _match_fields(
    dialect: CsvDialect, lines: LineBuffer, pattern: re.Pattern[bytes], start: int, end: int
) -> tuple[int, Fault | None]:
    data, base = lines.data, lines.base
    found = pattern.match(data, start - base, end - base)
    stop = start - base if found is None else found.end()
    rest = data[stop : end - base]
    if not rest.strip(b"\r"):
        return base + stop, None
    if dialect.opens(rest[0]):
        return base + stop, "open"
    return base + stop, "return" if rest[0] == ord("\r") else "junk"
