"""The tails of prompts, behind the blocks that they share: read, compared, and as numbers that sort as tokens do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints
from batchinfer.plan.order.block_hashes import BLOCK
from batchinfer.plan.order.requests import Prompts, read_together

# Two tokens a column. DuckDB sorts numbers in less than half the time that values of bytes take
# (docs/measurements/prefixes.md).
TAIL_COLUMNS = tuple(f"tail{at}" for at in range(BLOCK // 2))

Tails = NDArray[np.uint32]  # (prompts, BLOCK): token ids + 1, and 0 behind a prompt's end


def read_tails(prompts: Prompts, offsets: NDArray[np.int64], counts: NDArray[np.int64]) -> Tails:
    """Read `counts` tokens from each of these places, at most BLOCK."""
    counts = np.minimum(counts, BLOCK)
    found = np.zeros((len(offsets), BLOCK), np.uint32)
    for some, tokens, starts in read_together(prompts, offsets, counts):
        at = starts[:, None] + np.arange(BLOCK)
        inside = np.arange(BLOCK) < counts[some, None]
        found[some][inside] = tokens[at[inside]].astype(np.uint32) + 1
    return found


def common_tokens(tails: Tails, before: Tails) -> Ints:
    """Return how many tokens each tail shares with the one before it. `before`: (1, BLOCK), the one before them all."""
    differ = (tails == 0) | (tails != np.concatenate([before, tails[:-1]]))
    return np.where(differ.any(axis=1), differ.argmax(axis=1), BLOCK).astype(np.int32)


def to_columns(tails: Tails) -> list[NDArray[np.uint64]]:
    """Return values of TAIL_COLUMNS, which sort as the tokens do; what has ended comes first."""
    pairs = tails.astype(np.uint64).reshape(-1, BLOCK // 2, 2)
    return list(np.ascontiguousarray((pairs[:, :, 0] << np.uint64(32) | pairs[:, :, 1]).T))


def from_columns(columns: list[NDArray[np.uint64]]) -> Tails:
    """Return the tails of which these are the columns."""
    pairs = np.stack(columns, axis=1)
    return (
        np.stack([pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)], axis=2)
        .astype(np.uint32)
        .reshape(-1, BLOCK)
    )
