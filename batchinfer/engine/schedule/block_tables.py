"""Manages the block tables of sequences, one per cache group. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.engine.schedule.sequence import Sequence

FREED = 0  # table entry for a freed block before a window. Operators never read it


class BlockTables:
    """Allocates, shares and frees the KV cache blocks of sequences.

    A sequence has one block table per cache group, and all its tables have the same length. In a table with a sliding
    window, the first `sequence.freed[group]` entries are blocks that were freed already.

    Args:
        pool: The block pool.
        windows: The sliding window of each cache group in tokens. None: the group keeps all tokens.
    """

    def __init__(self, pool: BlockPool, windows: tuple[int | None, ...]) -> None:
        self.pool = pool
        self.sizes = TableSizes(pool.block_size, windows)
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]

    @property
    def have_windows(self) -> bool:
        """True if any cache group has a sliding window."""
        return bool(self._windows)

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Return how many blocks must be allocated so that all tables of a sequence have room for `tokens` tokens.

        The result is negative if the tables have more blocks than needed.
        """
        return (self.sizes.blocks(tokens) - len(sequence.tables[0])) * len(sequence.tables)

    def extend(self, sequence: Sequence, missing: int) -> None:
        """Allocate `missing` blocks for a sequence and append them to its tables, the same number to each."""
        blocks, tables = self.pool.allocate(missing), sequence.tables
        for number, table in enumerate(tables):
            table += blocks[number :: len(tables)]

    def tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that fit into the allocated blocks of a sequence."""
        return len(sequence.tables[0]) * self.pool.block_size

    def room(self, sequence: Sequence) -> int:
        """Return the length, in tokens, that a sequence could reach if it got all free and cached blocks."""
        tables = sequence.tables
        return (len(tables[0]) + self.pool.available // len(tables)) * self.pool.block_size

    def free_outside_windows(self, sequence: Sequence, start: int) -> None:
        """Free the blocks of a sequence that are outside the sliding windows of all tokens from `start` on.

        Args:
            sequence: The sequence.
            start: The position of the first token that will still be computed.
        """
        for group, window in self._windows:
            first, last = (
                sequence.freed[group],
                min(self.sizes.unseen(window, start), len(sequence.tables[group])),
            )
            if first < last:
                self._drop(sequence, group, window, first, last)
                sequence.tables[group][first:last] = [FREED] * (last - first)
                sequence.freed[group] = last

    def truncate(self, sequence: Sequence, tokens: int) -> bool:
        """Free the blocks of a sequence after the blocks of its first `tokens` tokens.

        Returns:
            True if any blocks were freed.
        """
        kept = self.sizes.blocks(tokens)
        if kept >= len(sequence.tables[0]):
            return False
        for table in sequence.tables:
            self.pool.release(table[kept:])
        # New lists show PlanWriter that the tables changed in another way than by growing
        sequence.tables = [table[:kept] for table in sequence.tables]
        return True

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and empty its tables."""
        for group, window in self._windows:
            self._drop(sequence, group, window, sequence.freed[group], len(sequence.tables[group]))
        for group in self._whole:
            self.pool.release(sequence.tables[group])
        sequence.tables, sequence.freed = [], []

    def unshare(self, sequence: Sequence) -> None:
        """Release the shared blocks of a waiting sequence that cannot be admitted. This undoes `share`."""
        for blocks in self.owned_blocks(sequence):
            self.pool.release(blocks)
        sequence.tables, sequence.freed = [], []

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Register the contents of the prompt blocks that a step completes, so other sequences can share the blocks.

        The partial block at the end of the prompt is registered, too, because its tokens can be copied.

        Args:
            sequence: The sequence.
            start: The position of the first token that the step runs.
            end: The position after the last token that the step runs.
        """
        size = self.pool.block_size
        first, last = (sequence.prompt_blocks(n, size) for n in (start, end))
        ends = start < sequence.prompt_length <= end and sequence.prompt_length % size > 0
        for index in range(first, last + ends):
            digest = sequence.content(index, size)
            for group, table in enumerate(sequence.tables):
                if index >= sequence.freed[group]:
                    self.pool.register(table[index], digest, group)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of leading tokens of a waiting sequence that `share` would find in the prefix cache."""
        return self._reusable(sequence.hashes[: sequence.reserved]) * self.pool.block_size

    def share(self, sequence: Sequence) -> None:
        """Fill the empty tables of a waiting sequence with the cached blocks of its longest prefix."""
        digests = sequence.hashes[: sequence.reserved]
        blocks = self._reusable(digests)
        sequence.tables, sequence.freed = [], []
        for group, window in enumerate(self.sizes.windows):
            first = 0 if window is None else self.sizes.unseen(window, blocks * self.pool.block_size)
            found = [
                block
                for digest in digests[first:blocks]
                if (block := self.pool.find(digest, group)) is not None
            ]
            assert len(found) == blocks - first, "a shared block is not there"
            self.pool.acquire(found)
            sequence.tables.append([FREED] * first + found)
            sequence.freed.append(first)

    def owned_blocks(self, sequence: Sequence) -> Iterator[list[int]]:
        """Yield the blocks of each table of a sequence, without the entries of blocks that were freed."""
        for table, left in zip(sequence.tables, sequence.freed, strict=True):
            yield table[left:]

    def check(self, sequence: Sequence) -> None:
        """Check, in tests, that the tables of a sequence are consistent.

        Raises:
            AssertionError: If the tables differ in length, or a block that may still be read is missing.
        """
        assert {len(table) for table in sequence.tables} == {len(sequence.tables[0])}, (
            "tables differ in length"
        )
        assert len(sequence.tables[0]) >= self.sizes.blocks(sequence.computed), (
            "computed tokens without block"
        )
        for left, window in zip(sequence.freed, self.sizes.windows, strict=True):
            seen = 0 if window is None else self.sizes.unseen(window, sequence.computed)
            assert left <= seen, "a window has lost a block"

    def _reusable(self, digests: list[bytes]) -> int:
        # In tables with a window, only the blocks that the next token reads must be cached
        blocks = len(digests)
        for group in self._whole:
            absent = (i for i in range(blocks) if self.pool.find(digests[i], group) is None)
            blocks = next(absent, blocks)
        while blocks:
            gaps = [self._gap(digests, blocks, group, window) for group, window in self._windows]
            shorter = min((gap for gap in gaps if gap is not None), default=None)
            if shorter is None:
                break
            blocks = shorter
        return blocks

    def _gap(self, digests: list[bytes], blocks: int, group: int, window: int) -> int | None:
        first = self.sizes.unseen(window, blocks * self.pool.block_size)
        indices = range(blocks - 1, first - 1, -1)
        return next((i for i in indices if self.pool.find(digests[i], group) is None), None)

    def _drop(self, sequence: Sequence, group: int, window: int, first: int, last: int) -> None:
        # A block is not kept for a waiting sequence that can continue from a later block whose window does not include
        # the block
        table, reach = sequence.tables[group], 1 + (window - 2) // self.pool.block_size
        digests = sequence.hashes[first + reach : last + reach]
        beyond = [digest if self.pool.find(digest, group) is not None else None for digest in digests]
        beyond += [None] * (last - first - len(beyond))
        for index in range(last - 1, first - 1, -1):
            self.pool.drop(table[index], beyond[index - first])
