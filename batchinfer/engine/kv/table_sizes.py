"""Computes the number of blocks that a sequence needs in all its block tables. Free of torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The block counts of a sequence, which has one block table per cache group.

    All tables have blocks for the same positions, but a table with a window frees the blocks before the window.
    """

    block_size: int  # tokens per block
    windows: tuple[int | None, ...] = (None,)  # window of each table in tokens; None: all tokens are kept
    whole: int = field(init=False)  # number of tables without a window
    windowed: tuple[tuple[int, int], ...] = field(init=False)  # pairs of (window, number of its tables)

    def __post_init__(self) -> None:
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows are {self.windows}: each must be at least 1, or None")
        counted = Counter(self.windows)
        object.__setattr__(self, "whole", counted.pop(None, 0))
        object.__setattr__(self, "windowed", tuple((w, n) for w, n in counted.items() if w is not None))

    @property
    def tables(self) -> int:
        """The number of tables."""
        return len(self.windows)

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks for this number of tokens in one table."""
        return -(-tokens // self.block_size)

    def span(self, window: int, chunk: int = 1) -> int:
        """Return the maximum number of blocks that a chunk of this number of tokens sees, at any position."""
        return (window + chunk + self.block_size - 3) // self.block_size + 1

    def unseen(self, window: int, start: int) -> int:
        """Return the number of leading blocks that no token from position `start` on sees."""
        return max(0, start - window + 1) // self.block_size

    def alone(self, tokens: int, budget: int) -> int:
        """Return the maximum number of blocks that a sequence holds if no other sequence runs.

        Args:
            tokens: The maximum length of the sequence.
            budget: The maximum number of tokens per step.
        """
        whole, chunk = self.blocks(tokens), max(1, min(tokens, budget))
        windows = sum(tables * min(whole, self.span(window, chunk)) for window, tables in self.windowed)
        return self.whole * whole + windows

    def among_others(self, tokens: int) -> int:
        """Return the maximum number of blocks of a sequence in a batch, without its share of `for_chunks`.

        A chunk of c tokens sees at most span(window) + ceil((c - 1) / block_size) blocks, which is at most
        span(window) + 1 + c // block_size. The last term is counted by `for_chunks`.
        """
        whole = self.blocks(tokens)
        windows = sum(tables * min(whole, self.span(window) + 1) for window, tables in self.windowed)
        return self.whole * whole + windows

    def for_chunks(self, budget: int) -> int:
        """Return the additional blocks for the chunks of a step in tables with windows, beyond `among_others`.

        The result is doubled, because drafts of the previous step may be rolled back.
        """
        return 2 * sum(tables for _, tables in self.windowed) * (budget // self.block_size)

    def of_chunk(self, tokens: int, chunk: int) -> int:
        """Return the additional blocks for a chunk in tables with windows, compared with a single token.

        Args:
            tokens: The length of the sequence.
            chunk: The tokens of the chunk.
        """
        whole = self.blocks(tokens)
        return sum(
            tables * (min(whole, self.span(window, max(1, chunk))) - min(whole, self.span(window)))
            for window, tables in self.windowed
        )
