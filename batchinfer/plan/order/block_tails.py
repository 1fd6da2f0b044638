"""The tails of prompts, behind the blocks that they share: read, compared, and as bytes that sort as the tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints
from batchinfer.plan.order.block_hashes import BLOCK
from batchinfer.plan.order.requests import Prompts

TAIL_BYTES = 4 * BLOCK
_GAP = 4096  # tokens; copying 16 KiB that lie between two tails takes less time than reading once more
_AT_ONCE = 1 << 18  # tokens

Tails = NDArray[np.uint32]  # (prompts, BLOCK): token ids + 1, and 0 behind a prompt's end


def read_tails(prompts: Prompts, offsets: NDArray[np.int64], counts: NDArray[np.int64]) -> Tails:
    """Read `counts` tokens from each of these places, at most BLOCK. A tail that lies shortly behind another one is
    read with it, up to about _AT_ONCE tokens."""
    counts = np.minimum(counts, BLOCK)
    found = np.zeros((len(offsets), BLOCK), np.uint32)
    for start, end in _near(offsets):
        first, each = offsets[start], counts[start:end]
        tokens = prompts.read(int(first), int((offsets[start:end] + each).max() - first))
        inside = np.arange(BLOCK) < each[:, None]
        at = (offsets[start:end] - first)[:, None] + np.arange(BLOCK)
        found[start:end][inside] = tokens[at[inside]].astype(np.uint32) + 1
    return found


def _near(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of places that are read at once."""
    gaps = np.diff(offsets)
    cuts = np.flatnonzero((gaps < 0) | (gaps > _GAP) | (np.diff(offsets // _AT_ONCE) > 0)) + 1
    edges = [0, *cuts.tolist(), len(offsets)]
    yield from ((start, end) for start, end in pairwise(edges) if start < end)


def common_tokens(tails: Tails, before: Tails) -> Ints:
    """Return how many tokens each tail shares with the one before it. `before`: (1, BLOCK), the one before them all."""
    differ = (tails == 0) | (tails != np.concatenate([before, tails[:-1]]))
    return np.where(differ.any(axis=1), differ.argmax(axis=1), BLOCK).astype(np.int32)


def to_arrow(tails: Tails) -> pa.Array:
    """Return values that sort as the tokens do; what has ended comes first."""
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(TAIL_BYTES), len(tails), [None, pa.py_buffer(tails.astype(">u4"))]
    )


def from_arrow(values: pa.Array) -> Tails:
    """Return the tails of a column, however a database gives it back."""
    fixed = values.cast(pa.binary(TAIL_BYTES))
    words = np.frombuffer(fixed.buffers()[1], ">u4", len(fixed) * BLOCK, fixed.offset * TAIL_BYTES)
    return words.astype(np.uint32).reshape(-1, BLOCK)
