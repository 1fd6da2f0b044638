"""Computes the number of blocks that a sequence needs in all its block tables. Free of torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Computes the number of KV cache blocks of a sequence, which has one block table per cache group.

    All tables have blocks for the same positions, but a table with a sliding window frees the blocks before the
    window.

    Attributes:
        block_size: The number of tokens per block.
        windows: The sliding window of each table in tokens. None: the table keeps all tokens.
        unwindowed: The number of tables without a window.
        windowed: For each different window, (window, number of tables that have it).
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    unwindowed: int = field(init=False)
    windowed: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows are {self.windows}: each must be at least 1, or None")
        counted = Counter(self.windows)
        object.__setattr__(self, "unwindowed", counted.pop(None, 0))
        object.__setattr__(self, "windowed", tuple((w, n) for w, n in counted.items() if w is not None))

    @property
    def tables(self) -> int:
        """The number of block tables of a sequence."""
        return len(self.windows)

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that a block table without a sliding window needs for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def span(self, window: int, chunk: int = 1) -> int:
        """Return the maximum number of blocks that a chunk reads in a block table with a sliding window.

        Args:
            window: The window in tokens.
            chunk: The number of tokens of the chunk, which may begin anywhere within a block.
        """
        return (window + chunk + self.block_size - 3) // self.block_size + 1

    def unseen(self, window: int, start: int) -> int:
        """Return the number of leading blocks that are outside the sliding window of all tokens from `start` on.

        These blocks can be freed.

        Args:
            window: The sliding window of the block table in tokens.
            start: The position of the first token that will still be computed.
        """
        return max(0, start - window + 1) // self.block_size

    def alone(self, tokens: int, budget: int) -> int:
        """Return the maximum number of blocks, in all block tables together, of a sequence that runs alone.

        Args:
            tokens: The maximum length of the sequence.
            budget: The maximum number of tokens per step.
        """
        whole, chunk = self.blocks(tokens), max(1, min(tokens, budget))
        windows = sum(tables * min(whole, self.span(window, chunk)) for window, tables in self.windowed)
        return self.unwindowed * whole + windows

    def among_others(self, tokens: int) -> int:
        """Return the maximum number of blocks, in all block tables together, of a sequence that runs with others.

        Each step is assumed to compute one token of the sequence. `for_chunks` returns the additional blocks for
        chunks with more tokens.

        Args:
            tokens: The length of the sequence.
        """
        whole = self.blocks(tokens)
        windows = sum(tables * min(whole, self.span(window) + 1) for window, tables in self.windowed)
        return self.unwindowed * whole + windows

    def for_chunks(self, budget: int) -> int:
        """Return the number of blocks that all chunks of a step need in addition to the blocks from `among_others`.

        It is 0 unless a block table has a sliding window.

        Args:
            budget: The maximum number of tokens per step.
        """
        # Doubled: drafts of the previous step may be discarded afterwards
        return 2 * sum(tables for _, tables in self.windowed) * (budget // self.block_size)

    def of_chunk(self, tokens: int, chunk: int) -> int:
        """Return how many more blocks a sequence needs for a chunk than for a single token.

        It is 0 unless a block table has a sliding window.

        Args:
            tokens: The length of the sequence in tokens.
            chunk: The number of tokens of the chunk.
        """
        whole = self.blocks(tokens)
        return sum(
            tables * (min(whole, self.span(window, max(1, chunk))) - min(whole, self.span(window)))
            for window, tables in self.windowed
        )
