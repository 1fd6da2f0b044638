"""Runs of records that lines hold (JSON lines, CSV)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.data.input.chunk import LazyRows
from batchinfer.data.input.digests.runs import Numbers, OpenedRuns, run_digests, run_ends, weights
from batchinfer.data.input.rows import Values

Record = TypeVar("Record", bound=tuple[int, object])  # the number of its first line, and what it holds
_NEWLINE = 10


class LineRuns(Generic[Record]):
    """The runs of a chunk's lines. `cut` reads the records of whole lines, the first of which has a number;
    `digests_of` takes the digests of records, and `row` reads one."""

    def __init__(
        self,
        data: bytes,
        line: int,
        ends: Numbers,
        cut: Callable[[int, bytes], Iterable[Record]],
        digests_of: Callable[[Sequence[Record]], bytes],
        row: Callable[[Record], Values | RowError],
        reading: object,
    ) -> None:
        """`line`: the number of the first one; `ends`: where records may end, which no newline within one may be."""
        self._data, self._cut, self._digests_of, self._row = data, cut, digests_of, row
        self._ends = ends[run_ends(weights(data, _starts(ends))) - 1]
        self._starts = _starts(self._ends)
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
        self._lines = line + np.searchsorted(newlines, self._starts)
        self.digests = run_digests(self._pieces(), reading)

    def _pieces(self) -> Iterator[tuple[memoryview]]:
        with memoryview(self._data) as data:
            for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
                yield (data[start:end],)

    def opened(self, which: Numbers) -> OpenedRuns:
        """Read the rows of these runs; of runs that follow one another at once."""
        records = list[Record]()
        for first, last in _neighbours(which):
            data = self._data[int(self._starts[first]) : int(self._ends[last])]
            records.extend(self._cut(int(self._lines[first]), data))
        numbers = np.array([one[0] for one in records], np.int64)
        of = np.searchsorted(self._lines[which], numbers, side="right") - 1
        sizes = np.bincount(of, minlength=len(which)).astype(np.int64)
        return OpenedRuns(LazyRows(records, self._row), sizes, self._digests_of(records))


def _starts(ends: Numbers) -> Numbers:
    """Return where stretches begin that follow one another from 0 on."""
    return np.concatenate([np.zeros(1, np.int64), ends])[:-1]


def _neighbours(which: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each group of numbers that follow one another."""
    for group in np.split(which, np.flatnonzero(np.diff(which) > 1) + 1):
        if len(group):
            yield int(group[0]), int(group[-1])


def line_ends(data: bytes) -> Numbers:
    """Return where lines end, the last of which need not have a newline."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE).astype(np.int64) + 1
    return ends if not data or data.endswith(b"\n") else np.append(ends, len(data))


def quoted_line_ends(data: bytes, quote: int, delimiter: int) -> Numbers | None:
    """Return where those lines end that end a record of CSV. None where quotes stand within a field without quotes:
    then the number of quotes before a newline does not tell whether it stands within some."""
    found = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(found == quote)
    if len(quotes) % 2:
        return None
    opening, closing = quotes[::2], quotes[1::2]
    before = found[np.maximum(opening - 1, 0)]
    behind = found[np.minimum(closing + 1, len(found) - 1)]
    begins = (opening == 0) | np.isin(before, (quote, delimiter, _NEWLINE))
    ends = (closing == len(found) - 1) | np.isin(behind, (quote, delimiter, _NEWLINE, ord("\r")))
    if not (begins.all() and ends.all()):
        return None
    lines = line_ends(data)
    outside: NDArray[np.bool_] = np.searchsorted(quotes, lines) % 2 == 0
    return np.asarray(lines[outside], np.int64)
