"""Records of CSV, cut out of a file's bytes in linear time and bounded memory, however broken they are.

A record goes on over a line's end only within quotes. So all records that cross the same line's end are in the same
state there, and end alike: what becomes of a quote that is opened in line 5 and never closed also becomes of one that
is opened in line 6. `_OpenQuote` is therefore walked through the file once, for all the records that begin in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from batchinfer.data.input.formats.csv_dialect import CsvDialect
from batchinfer.data.input.formats.line_buffer import LineBuffer
from batchinfer.data.input.rows import RowProblem

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
        lines = self._lines
        while (end := lines.line_end(self._cap + 1)) is not None:
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
