"""Block tables as arrays, kept from step to step: the host writes what was appended, not every table again."""

from __future__ import annotations

from itertools import compress, repeat
from operator import is_not, ne, or_

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.step_tables import StepTables

Tables = NDArray[np.int32]
Places = NDArray[np.int64]


def places_of(wanted: list[Sequence], among: list[Sequence]) -> list[int]:
    """The place of each in `among`, -1 where it is not there."""
    places = dict(zip(among, range(len(among)), strict=True))
    # Without a loop: a row ends with nearly every step of a full batch
    return list(map(places.get, wanted, repeat(-1)))


class TableRows:
    """The block tables of the newest step's sequences: for each cache group an array, in which a sequence keeps its row
    for as long as every step runs it. Sequences that come and go leave the rows of the others where they are."""

    def __init__(self) -> None:
        self._groups: list[_GroupRows] = []
        self._sequences: list[Sequence] = []
        self._rows: Places = np.zeros(0, np.int64)  # of each of them
        self._rotated = np.zeros(0, np.int64)

    def of(self, sequences: list[Sequence]) -> list[StepTables]:
        """Bring the arrays up to date, one of each cache group. They are valid until the next call.

        Entries of blocks that a window has left (see BlockTables) may still name the block that they named.
        """
        groups = len(sequences[0].tables)
        self._groups += [_GroupRows(group) for group in range(len(self._groups), groups)]
        if sequences != self._sequences:
            self._arrange(sequences)
        return [kept.of(sequences, self._rows) for kept in self._groups]

    def rotations(self, sequences: list[Sequence]) -> NDArray[np.int64]:
        """Return the rows of the rotary tables at which the positions of the newest step's sequences begin, (S,)."""
        if len(self._rotated) != len(sequences):
            self._rotated = np.array([s.rope_offset for s in sequences], np.int64)
        return self._rotated

    def unsent(self) -> list[tuple[Places, Tables]]:
        """Return for each cache group the places, in its array laid out flat, that were written since `sent`, and what
        they hold."""
        return [kept.unsent() for kept in self._groups]

    def sent(self) -> None:
        """Note that another copy of the arrays holds all that was written."""
        for kept in self._groups:
            kept.sent()

    def arrays(self) -> list[Tables]:
        """Return the array of each cache group, (rows, blocks)."""
        return [kept.kept for kept in self._groups]

    def _arrange(self, sequences: list[Sequence]) -> None:
        """Give the rows of sequences that left to those that are new."""
        before = places_of(sequences, self._sequences)
        places = np.array(before, np.int64)
        come = np.flatnonzero(places < 0)
        rows = np.append(self._rows, 0)[places]
        free = np.ones(max(len(sequences), self._rows.max(initial=-1) + 1), bool)
        free[rows[places >= 0]] = False
        rows[come] = np.flatnonzero(free)[: len(come)]
        for kept in self._groups:
            kept.arrange(before, rows[come])
        self._sequences, self._rows, self._rotated = sequences, rows, np.zeros(0, np.int64)


class _GroupRows:
    def __init__(self, group: int) -> None:
        self._group = group
        self._tables: list[list[int]] = []  # that each row was written from; another list is another table
        self._filled: list[int] = []  # entries written of each
        self.kept: Tables = np.zeros((0, 0), np.int32)
        self._ends: Places = np.zeros(0, np.int64)  # of each row: entries written
        self._sent: Places = np.zeros(0, np.int64)  # of them, those that another copy holds

    def of(self, sequences: list[Sequence], rows: Places) -> StepTables:
        group, filled = self._group, self._filled
        tables = [sequence.tables[group] for sequence in sequences]
        # without a loop: a decode step changes few of its tables
        changed = map(or_, map(ne, map(len, tables), filled), map(is_not, tables, self._tables))
        for place in list(compress(range(len(tables)), changed)):
            self._write(place, int(rows[place]), tables[place])
        return StepTables(self.kept, rows, max(filled))

    def arrange(self, before: list[int], fresh: Places) -> None:
        """`before`: for each sequence its place among those of the step before, or -1; `fresh`: rows of these."""
        self._tables = list(map([*self._tables, _NO_TABLE].__getitem__, before))
        self._filled = list(map([*self._filled, 0].__getitem__, before))
        rows = int(fresh.max(initial=-1)) + 1
        if rows > len(self.kept):
            self._grow(max(rows, 2 * len(self.kept)), self.kept.shape[1])
        self.kept[fresh], self._ends[fresh], self._sent[fresh] = 0, 0, 0

    def unsent(self) -> tuple[Places, Tables]:
        rows = np.flatnonzero(self._sent < self._ends)
        first, counts = self._sent[rows], (self._ends - self._sent)[rows]
        behind = np.cumsum(counts) - counts - first
        columns = np.arange(counts.sum()) - np.repeat(behind, counts)
        row_of = np.repeat(rows, counts)
        return row_of * self.kept.shape[1] + columns, self.kept[row_of, columns]

    def sent(self) -> None:
        self._sent[:] = self._ends

    def _write(self, place: int, row: int, table: list[int]) -> None:
        """Write what a table has more than its row, or all of it."""
        if len(table) > self.kept.shape[1]:
            self._grow(len(self.kept), 2 * len(table))  # and room for as many again
        first = self._filled[place]
        if table is not self._tables[place] or len(table) < first:
            self.kept[row, :first], self._sent[row], first = 0, 0, 0
        self.kept[row, first : len(table)] = table[first:]
        self._tables[place], self._filled[place], self._ends[row] = table, len(table), len(table)

    def _grow(self, rows: int, blocks: int) -> None:
        larger = np.zeros((rows, blocks), np.int32)
        larger[tuple(slice(n) for n in self.kept.shape)] = self.kept
        missing = np.zeros(rows - len(self._ends), np.int64)
        self.kept = larger
        self._ends, self._sent = np.append(self._ends, missing), np.append(self._sent, missing)


_NO_TABLE: list[int] = []
