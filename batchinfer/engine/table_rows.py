"""Block tables as arrays, kept from step to step: the host writes what was appended, not every table again."""

from __future__ import annotations

from itertools import compress
from operator import is_not, ne, or_

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.sequence import Sequence

Tables = NDArray[np.int32]


class TableRows:
    """The block tables of the newest step's sequences, for each cache group a row a sequence, in their order."""

    def __init__(self) -> None:
        self._groups: list[_GroupRows] = []
        self._sequences: list[Sequence] = []
        self._rotated = np.zeros(0, np.int64)

    def of(self, sequences: list[Sequence]) -> list[Tables]:
        """For each cache group (S, most blocks) int32, padded with 0. Valid until the next call.

        Entries of blocks that a window has left (see BlockTables) may still name the block that they named.
        """
        groups = len(sequences[0].tables)
        self._groups += [_GroupRows(group) for group in range(len(self._groups), groups)]
        return [kept.of(sequences) for kept in self._groups]

    def rotations(self, sequences: list[Sequence]) -> NDArray[np.int64]:
        """(S,): the rows of the rotary tables at which their positions begin."""
        if sequences != self._sequences:
            self._sequences = sequences
            self._rotated = np.array([s.rotated_from for s in sequences], np.int64)
        return self._rotated


class _GroupRows:
    def __init__(self, group: int) -> None:
        self._group = group
        self._sequences: list[Sequence] = []
        self._tables: list[list[int]] = []  # that each row was written from; another list is another table
        self._filled: list[int] = []  # entries written of each
        self._rows: Tables = np.zeros((0, 0), np.int32)

    def of(self, sequences: list[Sequence]) -> Tables:
        if sequences != self._sequences:
            self._rearrange(sequences)
        group, filled = self._group, self._filled
        tables = [sequence.tables[group] for sequence in sequences]
        # without a loop: a decode step changes few of its tables
        changed = map(or_, map(ne, map(len, tables), filled), map(is_not, tables, self._tables))
        for row in list(compress(range(len(tables)), changed)):
            self._write(row, tables[row])
        return self._rows[:, : max(filled)]

    def _rearrange(self, sequences: list[Sequence]) -> None:
        """Move the rows of sequences that stay to their new places."""
        places = {sequence: row for row, sequence in enumerate(self._sequences)}
        before = [places.get(sequence, -1) for sequence in sequences]
        stay = [row for row, old in enumerate(before) if old >= 0]
        rows = np.zeros((len(sequences), self._rows.shape[1]), np.int32)
        rows[stay] = self._rows[[before[row] for row in stay]]
        self._tables = [self._tables[old] if old >= 0 else _NO_TABLE for old in before]
        self._filled = [self._filled[old] if old >= 0 else 0 for old in before]
        self._rows, self._sequences = rows, sequences

    def _write(self, row: int, table: list[int]) -> None:
        """Write what a table has more than its row, or all of it."""
        if len(table) > self._rows.shape[1]:
            self._widen(len(table))
        first = self._filled[row]
        if table is not self._tables[row] or len(table) < first:
            self._rows[row, :first], first = 0, 0
        self._rows[row, first : len(table)] = table[first:]
        self._tables[row], self._filled[row] = table, len(table)

    def _widen(self, blocks: int) -> None:
        """Make room for tables of so many blocks, and for as many again."""
        wider = np.zeros((len(self._rows), 2 * blocks), np.int32)
        wider[:, : self._rows.shape[1]] = self._rows
        self._rows = wider


_NO_TABLE: list[int] = []
