"""Forecasts the most KV blocks that a set of sequences will hold at once. Ints only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.sequence import Sequence


def peak_blocks(ends: Iterable[tuple[int, Sequence]], pool: BlockPool) -> int:
    """The forecast for pairs of (steps that are left, sequence), if each sequence grows by one token a step.

    The peak lies in the last step of some sequence. A shared block counts once, for the user that leaves last.
    Walked from the last to leave to the first; the sequences alive are summed by whole blocks and by the tokens
    in the block after, which is all that growing by r tokens depends on.
    """
    size, counted = pool.block_size, _Counted(pool)
    whole, peak = 0, 0
    parts = [0] * size
    for alive, (steps, sequence) in enumerate(sorted(ends, key=_steps, reverse=True), 1):
        full, part = divmod(len(sequence.tokens), size)
        whole += full - counted.before(sequence.blocks)
        parts[part] += 1
        blocks, rest = divmod(steps, size)
        # growing by `rest` tokens ends in one block more, in two where the block overflows, in none where both are 0
        held = whole + alive * (blocks + 1) + sum(parts[size - rest + 1 :]) - (0 if rest else parts[0])
        peak = max(peak, held)
    return peak


def _steps(end: tuple[int, Sequence]) -> int:
    return end[0]


class _Counted:
    """Remembers which shared blocks were counted. A table's shared blocks come first, and among them those that were
    counted with another table, because a sequence that holds a block holds its parents.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: set[int] = set()

    def before(self, table: list[int]) -> int:
        """How many blocks of the table were counted before. Marks its other shared blocks as counted."""
        if not table or self._pool.users(table[0]) < 2:
            return 0
        shared = bisect_left(table, True, key=self._is_private)
        seen = bisect_left(table, True, 0, shared, key=self._is_new)
        self._blocks.update(table[seen:shared])
        return seen

    def _is_private(self, block: int) -> bool:
        return self._pool.users(block) < 2

    def _is_new(self, block: int) -> bool:
        return block not in self._blocks
