"""Fills and empties the block tables of sequences, one for each cache group. Ints only."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.engine.schedule.sequence import Sequence

LEFT = 0  # entry of a block that a window has left. Operators do not read what it names


class BlockTables:
    """All tables of a sequence have the same length. Those of a window give up the blocks that it has left: entries
    before `sequence.freed` name no block of the sequence.
    """

    def __init__(self, pool: BlockPool, windows: tuple[int | None, ...]) -> None:
        """`windows`: how many tokens back each table is read, None: all."""
        self.pool = pool
        self.sizes = TableSizes(pool.block_size, windows)
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]

    @property
    def have_windows(self) -> bool:
        return bool(self._windows)

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Count the blocks to allocate until the tables hold this many tokens; less than 0 if they hold more."""
        return (self.sizes.blocks(tokens) - len(sequence.tables[0])) * len(sequence.tables)

    def extend(self, sequence: Sequence, missing: int) -> None:
        """Allocate `missing` blocks, as many for each table."""
        blocks, tables = self.pool.allocate(missing), sequence.tables
        for number, table in enumerate(tables):
            table += blocks[number :: len(tables)]

    def tokens(self, sequence: Sequence) -> int:
        """Count the tokens that its tables have room for."""
        return len(sequence.tables[0]) * self.pool.block_size

    def room(self, sequence: Sequence) -> int:
        """Count the tokens that its tables could hold with all that is available."""
        tables = sequence.tables
        return (len(tables[0]) + self.pool.available // len(tables)) * self.pool.block_size

    def leave_behind(self, sequence: Sequence, start: int) -> None:
        """Free the blocks in which no token from `start` on sees anything."""
        for group, window in self._windows:
            first, last = (
                sequence.freed[group],
                min(self.sizes.left(window, start), len(sequence.tables[group])),
            )
            if first < last:
                self._drop(sequence, group, window, first, last)
                sequence.tables[group][first:last] = [LEFT] * (last - first)
                sequence.freed[group] = last

    def cut(self, sequence: Sequence, tokens: int) -> bool:
        """Free the blocks behind the first `tokens` tokens; whether there were any."""
        kept = self.sizes.blocks(tokens)
        if kept >= len(sequence.tables[0]):
            return False
        for table in sequence.tables:
            self.pool.release(table[kept:])
        # New lists: who keeps a table from step to step sees that it did not just grow
        sequence.tables = [table[:kept] for table in sequence.tables]
        return True

    def release(self, sequence: Sequence) -> None:
        """Free all its blocks."""
        for group, window in self._windows:
            self._drop(sequence, group, window, sequence.freed[group], len(sequence.tables[group]))
        for group in self._whole:
            self.pool.release(sequence.tables[group])
        sequence.tables, sequence.freed = [], []

    def give_back(self, sequence: Sequence) -> None:
        """Undo `share`: drop the references to all shared blocks."""
        for blocks in self.held(sequence):
            self.pool.release(blocks)
        sequence.tables, sequence.freed = [], []

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the prompt blocks findable that tokens [start, end) complete, and the one in which the prompt ends once
        it holds that: of those a part can be copied."""
        size = self.pool.block_size
        first, last = (sequence.prompt_blocks(n, size) for n in (start, end))
        ends = start < sequence.prompt_length <= end and sequence.prompt_length % size > 0
        for index in range(first, last + ends):
            digest = sequence.content(index, size)
            for group, table in enumerate(sequence.tables):
                if index >= sequence.freed[group]:
                    self.pool.register(table[index], digest, group)

    def found(self, sequence: Sequence) -> int:
        """Count the tokens of a waiting sequence that `share` would find."""
        return self._reusable(sequence.hashes[: sequence.reserved]) * self.pool.block_size

    def share(self, sequence: Sequence) -> None:
        """Acquire its first blocks, as far as they are cached."""
        digests = sequence.hashes[: sequence.reserved]
        blocks = self._reusable(digests)
        sequence.tables, sequence.freed = [], []
        for group, window in enumerate(self.sizes.windows):
            first = 0 if window is None else self.sizes.left(window, blocks * self.pool.block_size)
            found = [
                block
                for digest in digests[first:blocks]
                if (block := self.pool.find(digest, group)) is not None
            ]
            assert len(found) == blocks - first, "a shared block is not there"
            self.pool.acquire(found)
            sequence.tables.append([LEFT] * first + found)
            sequence.freed.append(first)

    def held(self, sequence: Sequence) -> Iterator[list[int]]:
        """The blocks of each of its tables."""
        for table, left in zip(sequence.tables, sequence.freed, strict=True):
            yield table[left:]

    def check(self, sequence: Sequence) -> None:
        """Raises AssertionError where a computed token that may still be seen has no block, or one that no token sees
        has."""
        assert {len(table) for table in sequence.tables} == {len(sequence.tables[0])}, (
            "tables differ in length"
        )
        assert len(sequence.tables[0]) >= self.sizes.blocks(sequence.computed), (
            "computed tokens without block"
        )
        for left, window in zip(sequence.freed, self.sizes.windows, strict=True):
            seen = 0 if window is None else self.sizes.left(window, sequence.computed)
            assert left <= seen, "a window has lost a block"

    def _reusable(self, digests: list[bytes]) -> int:
        """The most leading blocks behind which a sequence can go on: tables that keep all have them, and those of a
        window the ones that the next token sees."""
        blocks = len(digests)
        for group in self._whole:
            known = (i for i in range(blocks) if self.pool.find(digests[i], group) is None)
            blocks = next(known, blocks)
        while blocks:
            gaps = [self._gap(digests, blocks, group, window) for group, window in self._windows]
            shorter = min((gap for gap in gaps if gap is not None), default=None)
            if shorter is None:
                break
            blocks = shorter
        return blocks

    def _gap(self, digests: list[bytes], blocks: int, group: int, window: int) -> int | None:
        """The last block that a token behind `blocks` blocks sees and that is not there."""
        first = self.sizes.left(window, blocks * self.pool.block_size)
        indices = range(blocks - 1, first - 1, -1)
        return next((i for i in indices if self.pool.find(digests[i], group) is None), None)

    def _drop(self, sequence: Sequence, group: int, window: int, first: int, last: int) -> None:
        """Free entries of a window's table. A waiting sequence needs a block only if it goes on so soon behind it that
        its window reaches back to it."""
        table, reach = sequence.tables[group], 1 + (window - 2) // self.pool.block_size
        digests = sequence.hashes[first + reach : last + reach]
        beyond = [digest if self.pool.find(digest, group) is not None else None for digest in digests]
        beyond += [None] * (last - first - len(beyond))
        for index in range(last - 1, first - 1, -1):
            self.pool.drop(table[index], beyond[index - first])
