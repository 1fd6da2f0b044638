"""Records of CSV, cut out of a file's bytes in linear time and bounded memory, however broken they are.

A record goes on over a line's end only within quotes. So all records that cross the same line's end are in the same
state there, and end alike: what becomes of a quote that is opened in line 5 and never closed also becomes of one that
is opened in line 6. `_OpenQuote` is therefore walked through the file once, for all the records that begin in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from batchinfer.input.chunk import ChunkSize
from batchinfer.input.formats.csv_dialect import CsvDialect
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.rows import RowProblem

_LINE_END = 2  # a carriage return and a newline: the limit on a record leaves them out

Found = tuple[int, bytes | RowProblem, int]  # line number, the record without its line's end, bytes
Fault = Literal["open", "junk", "return", "never"]

_SAID: dict[Fault, str] = {
    "junk": "a quoted field goes on after its closing quote; quotes within quotes are doubled",
    "return": "a carriage return stands alone outside of quotes",
    "never": "a quote is opened and never closed",
}


class CsvRecords:
    """The records of a file; blank lines are skipped. A broken record costs its first line.

    `cut` tells, at the end of the lines, whether they are only the beginning of a file.
    """

    def __init__(self, lines: LineBuffer, dialect: CsvDialect, cap: int, cut: Callable[[], bool]) -> None:
        self._lines, self._dialect, self._cap, self._cut = lines, dialect, cap, cut
        self._mark = None if dialect.quote is None else dialect.quote.encode()
        self._open: _OpenQuote | None = None

    def __iter__(self) -> Iterator[Found]:
        while (end := self._lines.line_end(self._cap + 1)) is not None:
            yield from self._next(end)

    def first(self) -> Found | None:
        """Return the first record alone, the header; blank lines before it were passed over."""
        end = self._lines.line_end(self._cap + 1)
        return None if end is None else self._one(end)

    def blocks(self, size: ChunkSize) -> Iterator[tuple[int, bytes] | list[Found]]:
        """Yield the records in blocks that can be read on their own: lines with the number of the first one.

        Such lines are whole records whatever stands before or behind them. What a look ahead by a block's size does
        not show to be so is read here, up to there: a broken record, or a very long one.
        """
        lines = self._lines
        while lines.line_end(self._cap + 1) is not None:
            lines.look_ahead(size.bytes)
            seen, stop = lines.at + size.bytes, self._block_end(size)
            if stop > lines.at:
                yield lines.number, lines.take(stop, stop)
            else:
                yield list(self._until(seen))

    def _block_end(self, size: ChunkSize) -> int:
        """Return how far there are only whole records, within that size."""
        lines = self._lines
        stop = lines.block_end(size.bytes, size.lines) or lines.at
        start, data = lines.at - lines.base, lines.data
        if self._mark is None or data.find(self._mark, start, stop - lines.base) < 0:
            return stop
        if (
            self._cap < size.bytes
        ):  # a record over the limit costs its first line, and what follows begins there
            return lines.at
        found = self._dialect.records.match(data, start, stop - lines.base)
        return lines.at if found is None else lines.base + found.end()

    def _until(self, stop: int) -> Iterator[Found]:
        """Yield the records that begin before `stop`."""
        while self._lines.at < stop and (end := self._lines.line_end(self._cap + 1)) is not None:
            yield from self._next(end)

    def _next(self, end: int) -> Iterator[Found]:
        """Yield the records of the line that ends there, or of several lines from it on."""
        lines = self._lines
        if (plain := lines.lines_without(self._mark)) > lines.at and end >= 0:
            yield from self._plain(lines.number, lines.take(plain, plain))
        elif (found := self._one(end)) is not None:
            yield found

    def _plain(self, first: int, block: bytes) -> Iterator[Found]:
        """Lines without any quote are records."""
        for number, line in enumerate(block.split(b"\n"), first):
            size, line = len(line) + 1, line.rstrip(b"\r")
            if size > self._cap + _LINE_END:
                yield number, self._line_too_long(size - 1), 0
            elif b"\r" in line:
                yield number, RowProblem("bad_csv", _SAID["return"]), size
            elif line:
                yield number, line, size

    def _one(self, end: int) -> Found | None:
        """The record of the line that ends there; None where it holds none, or only the beginning of one."""
        lines, number = self._lines, self._lines.number
        if end < 0:
            return number, self._line_too_long(lines.skip_line()), 0
        size = end + 1 - lines.at
        stop, fault = _judged(self._dialect, lines, self._dialect.record, lines.at, end)
        if fault == "open":
            return self._long(number, end)
        empty, record = stop == lines.at, lines.take(stop, end + 1)
        if fault is not None:
            return number, RowProblem("bad_csv", _SAID[fault]), size
        return None if empty else (number, record, size)

    def _long(self, number: int, end: int) -> Found | None:
        """The record that opens a quote in the line that ends there and goes on below."""
        lines, limit = self._lines, self._cap + _LINE_END
        if self._open is None or not self._open.crossed(end):
            self._open = _OpenQuote(self._dialect, end + 1)
        fate, size = self._open.walk(lines, limit), self._open.at - lines.at
        if fate is None or size > limit:
            message = f"a quote is not closed within the limit of {self._cap} bytes"
            problem = RowProblem("line_too_long", message)
        elif fate == "closed":
            return number, lines.take(self._open.stop, self._open.at), size
        elif fate == "never" and self._cut():
            lines.take(lines.at, lines.end)
            return None
        else:
            problem = RowProblem("bad_csv", _SAID[fate])
        first = end + 1 - lines.at
        lines.take(lines.at, end + 1)
        return number, problem, first

    def _line_too_long(self, length: int) -> RowProblem:
        return RowProblem("line_too_long", f"the line has {length} bytes; the limit is {self._cap}")


class _OpenQuote:
    """A quote that is open at a line's end: what becomes of it, looked for as far as a record may reach.

    `at` is the line's start up to which that is known; once the record has ended, that behind it, and `stop` its end.
    """

    def __init__(self, dialect: CsvDialect, at: int) -> None:
        self._dialect = dialect
        self._fate: Fault | Literal["closed"] | None = None
        self.at = self.stop = at

    def crossed(self, end: int) -> bool:
        """Whether a quote that is open where the line ends is this one."""
        return self._fate == "never" or self.at > end + 1 or (self._fate is None and self.at == end + 1)

    def walk(self, lines: LineBuffer, limit: int) -> Fault | Literal["closed"] | None:
        """Return how the quoted field ends; None if the next `limit` bytes do not show it."""
        while self._fate is None and self.at - lines.at <= limit:
            if self.at < lines.whole:
                self._step(lines)
            elif lines.end - lines.at > limit:
                return None
            elif not lines.fill():
                self._fate, self.at = "never", lines.end + (not lines.data.endswith(b"\n"))
        return self._fate

    def _step(self, lines: LineBuffer) -> None:
        """Over lines within quotes, and one in which the quote is closed."""
        data, base, whole = lines.data, lines.base, lines.whole - lines.base
        closing = self._dialect.within.match(data, self.at - base, whole)
        if closing is None or closing.end() == whole:
            self.at = lines.whole
            return
        end = data.find(b"\n", closing.end(), whole)
        end = whole if end < 0 else end
        stop, fault = _judged(self._dialect, lines, self._dialect.rest, base + closing.end() + 1, base + end)
        self.at, self.stop = base + end + 1, stop
        if fault != "open":
            self._fate = fault or "closed"


def _judged(
    dialect: CsvDialect, lines: LineBuffer, pattern: re.Pattern[bytes], start: int, end: int
) -> tuple[int, Fault | None]:
    """Where the fields that follow `start` in the line that ends at `end` stop, and what is wrong there."""
    data, base = lines.data, lines.base
    found = pattern.match(data, start - base, end - base)
    stop = start - base if found is None else found.end()
    rest = data[stop : end - base]
    if not rest.strip(b"\r"):
        return base + stop, None
    if dialect.opens(rest[0]):
        return base + stop, "open"
    return base + stop, "return" if rest[0] == ord("\r") else "junk"
