"""Forecasts the peak number of KV blocks that a set of sequences will hold. Free of torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import heappop, heappush

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.sequence import Sequence

Ends = list[tuple[int, Sequence]]  # (remaining steps, sequence), most remaining steps first


def peak_blocks(ends: Iterable[tuple[int, Sequence]], tables: BlockTables) -> int:
    """Return the maximum number of KV cache blocks that sequences will hold together until all have ended.

    Each sequence grows by one token per step until its end. A shared block counts once. With sliding windows, the
    result is an upper bound.

    Args:
        ends: (number of remaining steps, sequence) for each sequence.
        tables: The block tables of the sequences.
    """
    # The maximum is reached in the last step of one of the sequences
    ordered = sorted(ends, key=_steps, reverse=True)
    held = [0] * len(ordered)
    if tables.sizes.unwindowed:
        held = _whole(ordered, tables)
    for window, count in tables.sizes.windowed:
        more = _windowed(ordered, tables, window)
        held = [sofar + count * blocks for sofar, blocks in zip(held, more, strict=True)]
    return max(held, default=0)


def _steps(end: tuple[int, Sequence]) -> int:
    return end[0]


def _whole(ordered: Ends, tables: BlockTables) -> list[int]:
    # All tables without a window have equally many blocks, so one is counted and multiplied
    group, count = tables.sizes.windows.index(None), tables.sizes.unwindowed
    counted, growing = CountedBlocks(tables.pool), _Growing(tables.pool.block_size)
    held = []
    for steps, sequence in ordered:
        table = sequence.tables[group]
        growing.add(len(sequence.tokens), counted.before(table, len(table)))
        held.append(count * growing.blocks(steps))
    return held


def _windowed(ordered: Ends, tables: BlockTables, window: int) -> list[int]:
    group, pool = tables.sizes.windows.index(window), tables.pool
    sliding = _Sliding(pool.block_size, tables.sizes.span(window))
    shared: set[int] = set()
    held = []
    for steps, sequence in ordered:
        left = sequence.freed[group]
        # No block after the prompt is shared
        prompt = sequence.tables[group][left : sequence.prompt_length // pool.block_size]
        common = [block for block in prompt if pool.users(block) > 1]
        shared.update(common)
        sliding.add(len(sequence.tokens), left + len(common))
        held.append(len(shared) + sliding.blocks(steps))
    return held


class _Growing:
    def __init__(self, size: int) -> None:
        # The number of full blocks, and how many sequences have 0, 1, 2, … tokens in their last block, determine
        # the sum after any number of steps
        self._size, self._whole, self._count = size, 0, 0
        self._parts = [0] * size

    def add(self, tokens: int, without: int) -> None:
        full, part = divmod(tokens, self._size)
        self._whole += full - without
        self._parts[part] += 1
        self._count += 1

    def blocks(self, steps: int) -> int:
        blocks, rest = divmod(steps, self._size)
        parts = self._parts
        # Growing by `rest` tokens needs one more block, two if the partial block overflows, none if both are empty
        more = sum(parts[self._size - rest + 1 :]) - (0 if rest else parts[0])
        return self._whole + self._count * (blocks + 1) + more


class _Sliding:
    def __init__(self, size: int, most: int) -> None:
        self._size, self._most = size, most
        self._growing = _Growing(size)
        # A heap of (- steps until the sequence reaches the maximum, tokens, blocks that are not counted)
        self._full: list[tuple[int, int, int]] = []

    def add(self, tokens: int, without: int) -> None:
        steps = (self._most + without - 1) * self._size - tokens + 1
        heappush(self._full, (-steps, tokens, without))

    def blocks(self, steps: int) -> int:
        # `steps` must decrease from call to call
        while self._full and -self._full[0][0] > steps:
            _, tokens, without = heappop(self._full)
            self._growing.add(tokens, without)
        return len(self._full) * self._most + self._growing.blocks(steps)


class CountedBlocks:
    """Counts the distinct blocks of several block tables, by remembering which shared blocks earlier tables had."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: set[int] = set()

    def before(self, table: list[int], most: int) -> int:
        """Return how many of a table's first `most` blocks also were in tables of earlier calls.

        Args:
            table: The block table of a sequence.
            most: The number of leading blocks to count.
        """
        # A table begins with shared blocks that earlier tables have, too. Other shared blocks follow, then
        # private blocks: a sequence that holds a block also holds the blocks before it.
        if not table or self._pool.users(table[0]) < 2:
            return 0
        shared = bisect_left(table, True, 0, most, key=self._is_private)
        seen = bisect_left(table, True, 0, shared, key=self._is_new)
        self._blocks.update(table[seen:shared])
        return seen

    def _is_private(self, block: int) -> bool:
        return self._pool.users(block) < 2

    def _is_new(self, block: int) -> bool:
        return block not in self._blocks
