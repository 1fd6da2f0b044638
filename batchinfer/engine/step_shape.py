"""Counts what a step runs and reads, from its chunks. Ints only."""

from __future__ import annotations

from collections import Counter

from batchinfer.engine.cache_layout import CacheLayout
from batchinfer.engine.scheduler import Chunk
from batchinfer_kernels.cost import StepShape


def step_shape(chunks: list[Chunk], sampled: int, layout: CacheLayout) -> StepShape:
    """The least work and memory traffic of these chunks, which sample `sampled` tokens."""
    pairs = kv_tokens = 0
    for window, layers in Counter(layout.windows).items():
        counted = _attended(chunks, window, layout)
        pairs, kv_tokens = pairs + layers * counted[0], kv_tokens + layers * counted[1]
    return StepShape(sum(c.length for c in chunks), sampled, pairs, kv_tokens)


def _attended(chunks: list[Chunk], window: int | None, layout: CacheLayout) -> tuple[int, int]:
    """(query, key) pairs, and distinct cached tokens read, of one layer."""
    if window is not None:
        pairs = sum(min(at + 1, window) for c in chunks for at in range(c.start, c.end))
        return pairs, sum(min(c.end, window + c.length - 1) for c in chunks)
    pairs = sum(c.length * (c.start + c.end + 1) // 2 for c in chunks)
    size, group = layout.block_size, layout.whole
    assert group is not None, "a layer without a window keeps all tokens"
    tables = [c.sequence.tables[group][: -(-c.end // size)] for c in chunks]
    shared = sum(map(len, tables)) - len(set().union(*tables))  # a block met again is read once for all
    return pairs, sum(c.end for c in chunks) - shared * size
