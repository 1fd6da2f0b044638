"""How many blocks of the KV cache a sequence takes, over all its block tables. Ints only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Counts blocks over the tables of a sequence, one for each cache group. `windows` says how many tokens back each
    table is read, None: all. Tables have a block for the same positions, but those of a window give up what it has
    left."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    whole: int = field(init=False)  # tables that keep everything
    windowed: tuple[tuple[int, int], ...] = field(init=False)  # (window, tables that it has)

    def __post_init__(self) -> None:
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows are {self.windows}: each must be at least 1, or None")
        counted = Counter(self.windows)
        object.__setattr__(self, "whole", counted.pop(None, 0))
        object.__setattr__(self, "windowed", tuple((w, n) for w, n in counted.items() if w is not None))

    @property
    def tables(self) -> int:
        return len(self.windows)

    def blocks(self, tokens: int) -> int:
        """Count the blocks of one table that keeps this many tokens."""
        return -(-tokens // self.block_size)

    def span(self, window: int, chunk: int = 1) -> int:
        """The most blocks that hold what a chunk of this many tokens sees, wherever it begins."""
        return (window + chunk + self.block_size - 3) // self.block_size + 1

    def left(self, window: int, start: int) -> int:
        """How many leading blocks no token from `start` on sees."""
        return max(0, start - window + 1) // self.block_size

    def alone(self, tokens: int, budget: int) -> int:
        """The most blocks that a sequence of up to `tokens` tokens holds at once, run up to `budget` at a time."""
        whole, chunk = self.blocks(tokens), max(1, min(tokens, budget))
        windows = sum(tables * min(whole, self.span(window, chunk)) for window, tables in self.windowed)
        return self.whole * whole + windows

    def among_others(self, tokens: int) -> int:
        """Count the most blocks that a sequence of this many tokens holds apart from its share of `for_chunks`.

        A chunk of c tokens sees span(window) + ceil((c - 1) / block_size) blocks at most: no more than one, and
        c // block_size, beyond those of a single token.
        """
        whole = self.blocks(tokens)
        windows = sum(tables * min(whole, self.span(window) + 1) for window, tables in self.windowed)
        return self.whole * whole + windows

    def for_chunks(self, budget: int) -> int:
        """Count the blocks that the chunks of a step take in tables of windows beyond `among_others`, and, if they were
        drafts that may be taken back, those of the step before."""
        return 2 * sum(tables for _, tables in self.windowed) * (budget // self.block_size)

    def of_chunk(self, tokens: int, chunk: int) -> int:
        """Count the blocks that a chunk takes in tables of windows beyond those of a single token, for a sequence of so
        many tokens."""
        whole = self.blocks(tokens)
        return sum(
            tables * (min(whole, self.span(window, max(1, chunk))) - min(whole, self.span(window)))
            for window, tables in self.windowed
        )
