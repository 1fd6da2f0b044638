"""Block tables as arrays in a runner, updated by the changes in each plan."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.step_plan import Ints, Longs, TableChanges
from batchinfer_kernels.step_tables import StepTables

Tables = NDArray[np.int32]


class TableRows:
    """The block tables of the running sequences on the host: an array per cache group, with a row per sequence.

    Args:
        first_block: The number of the first KV cache block that the engine uses. Plans count blocks from 0, so it is
            added to all entries.
    """

    def __init__(self, first_block: int = 0) -> None:
        self._first_block = first_block
        self._groups: list[_GroupRows] = []

    def take(self, changes: Seq[TableChanges], rows: Longs) -> list[StepTables]:
        """Apply the changes of a step plan, and return the block tables of the plan's sequences per cache group.

        The result is valid until the next call. Entries of blocks that are before a sliding window may be outdated.

        Args:
            changes: The changed entries per cache group.
            rows: [S], the row of each of the plan's S sequences.
        """
        self._groups += [_GroupRows(self._first_block) for _ in range(len(self._groups), len(changes))]
        return [kept.take(own, rows) for kept, own in zip(self._groups, changes, strict=True)]

    def unsent(self) -> list[tuple[Longs, Tables]]:
        """Return the entries that were written since the last call of `sent`, per cache group.

        Returns:
            Two arrays [n] per group: the indices of the entries in the flattened array of block tables, and their
            values.
        """
        return [kept.unsent() for kept in self._groups]

    def sent(self) -> None:
        """Mark all entries as sent to the device, so that `unsent` does not return them again."""
        for kept in self._groups:
            kept.written = []

    def arrays(self) -> list[Tables]:
        """Return the array of block tables of each cache group, [rows, blocks]."""
        return [kept.kept for kept in self._groups]


class _GroupRows:
    def __init__(self, first_block: int) -> None:
        self._first_block = first_block
        self.kept: Tables = np.zeros((0, 0), np.int32)
        self.written: list[tuple[Longs, Longs, Ints]] = []  # not sent yet: rows, columns, entries

    def take(self, changes: TableChanges, rows: Longs) -> StepTables:
        if len(changes.spans):
            self._write(changes.spans, changes.blocks + np.int32(self._first_block))
        return StepTables(self.kept, rows, changes.width)

    def unsent(self) -> tuple[Longs, Tables]:
        if len(self.written) == 1:
            ((row_of, columns, _),) = self.written
        else:  # later plans may have overwritten entries of earlier ones
            parts = zip(*self.written, strict=True) if self.written else [[np.zeros(0, np.int64)]] * 3
            row_of, columns, _ = map(np.concatenate, parts)
        return row_of * self.kept.shape[1] + columns, self.kept[row_of, columns]

    def _write(self, spans: Ints, blocks: Ints) -> None:
        rows, first, counts = spans.astype(np.int64).T
        self._make_room(int(rows.max()) + 1, int((first + counts).max()))
        self.kept[rows[first == 0]] = 0
        shifts = np.cumsum(counts) - counts - first
        columns, row_of = np.arange(len(blocks)) - np.repeat(shifts, counts), np.repeat(rows, counts)
        self.kept[row_of, columns] = blocks
        self.written.append((row_of, columns, blocks))

    def _make_room(self, rows: int, blocks: int) -> None:
        old_rows, old_blocks = self.kept.shape
        if rows <= old_rows and blocks <= old_blocks:
            return
        larger = np.zeros(
            (
                old_rows if rows <= old_rows else max(rows, 2 * old_rows),
                old_blocks if blocks <= old_blocks else 2 * blocks,
            ),
            np.int32,
        )
        larger[:old_rows, :old_blocks] = self.kept
        self.kept = larger
