"""Forecasts the most KV blocks that a set of sequences will hold at once. Ints only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import heappop, heappush

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.sequence import Sequence

Ends = list[tuple[int, Sequence]]  # (steps that are left, sequence), the last to leave first


def peak_blocks(ends: Iterable[tuple[int, Sequence]], tables: BlockTables) -> int:
    """The forecast for pairs of (steps that are left, sequence), if each sequence grows by one token a step.

    The peak lies in the last step of some sequence. A shared block counts once, for the user that leaves last. Exact
    where nothing has a window; with windows an upper bound, as each sequence counts with the most blocks that hold one,
    and blocks that are shared now are counted as if they stayed.
    """
    ordered = sorted(ends, key=_steps, reverse=True)
    held = [0] * len(ordered)
    if tables.sizes.whole:
        held = _whole(ordered, tables)
    for window, count in tables.sizes.windowed:
        more = _windowed(ordered, tables, window)
        held = [sofar + count * blocks for sofar, blocks in zip(held, more, strict=True)]
    return max(held, default=0)


def _steps(end: tuple[int, Sequence]) -> int:
    return end[0]


def _whole(ordered: Ends, tables: BlockTables) -> list[int]:
    """Count the blocks of the tables that keep all tokens, in the last step of each sequence. They share alike."""
    group, count = tables.sizes.windows.index(None), tables.sizes.whole
    counted, growing = CountedBlocks(tables.pool), _Growing(tables.pool.block_size)
    held = []
    for steps, sequence in ordered:
        table = sequence.tables[group]
        growing.add(len(sequence.tokens), counted.before(table, len(table)))
        held.append(count * growing.blocks(steps))
    return held


def _windowed(ordered: Ends, tables: BlockTables, window: int) -> list[int]:
    """Count the blocks of a table of this window, in the last step of each sequence."""
    group, pool = tables.sizes.windows.index(window), tables.pool
    sliding = _Sliding(pool.block_size, tables.sizes.span(window))
    shared: set[int] = set()
    held = []
    for steps, sequence in ordered:
        left = sequence.freed[group]
        # no block behind the prompt is shared
        prompt = sequence.tables[group][left : sequence.prompt_length // pool.block_size]
        common = [block for block in prompt if pool.users(block) > 1]
        shared.update(common)
        sliding.add(len(sequence.tokens), left + len(common))
        held.append(len(shared) + sliding.blocks(steps))
    return held


class _Growing:
    """Sums the blocks of sequences that grow by one token a step, without some that they have.

    The sequences are summed by whole blocks and by the tokens in the block after, which is all that growing by r tokens
    depends on.
    """

    def __init__(self, size: int) -> None:
        self._size, self._whole, self._count = size, 0, 0
        self._parts = [0] * size

    def add(self, tokens: int, without: int) -> None:
        full, part = divmod(tokens, self._size)
        self._whole += full - without
        self._parts[part] += 1
        self._count += 1

    def blocks(self, steps: int) -> int:
        """Count the blocks after `steps` steps."""
        blocks, rest = divmod(steps, self._size)
        parts = self._parts
        # growing by `rest` tokens ends in one block more, in two where the block overflows, in none where both are 0
        more = sum(parts[self._size - rest + 1 :]) - (0 if rest else parts[0])
        return self._whole + self._count * (blocks + 1) + more


class _Sliding:
    """Sums the blocks of sequences that hold no more than `most` each. It is asked for fewer and fewer steps."""

    def __init__(self, size: int, most: int) -> None:
        self._size, self._most = size, most
        self._growing = _Growing(size)
        # A heap of (- steps until it holds the most, tokens, without)
        self._full: list[tuple[int, int, int]] = []

    def add(self, tokens: int, without: int) -> None:
        steps = (self._most + without - 1) * self._size - tokens + 1
        heappush(self._full, (-steps, tokens, without))

    def blocks(self, steps: int) -> int:
        while self._full and -self._full[0][0] > steps:
            _, tokens, without = heappop(self._full)
            self._growing.add(tokens, without)
        return len(self._full) * self._most + self._growing.blocks(steps)


class CountedBlocks:
    """Remembers which shared blocks were counted. A table's shared blocks come first, and among them those that were
    counted with another table, because a sequence that holds a block holds its parents.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: set[int] = set()

    def before(self, table: list[int], most: int) -> int:
        """How many of the table's first `most` blocks were counted before. Marks its other shared ones as counted."""
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
