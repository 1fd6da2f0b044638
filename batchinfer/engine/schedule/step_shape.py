"""Counts what a step runs and reads, from its chunks. Ints only."""

from __future__ import annotations

from collections import Counter

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer_kernels.cost import StepShape


def step_shape(
    chunks: list[Chunk], sampled: int, shared: int, layout: CacheLayout, copied: int = 0
) -> StepShape:
    """The least work and memory traffic of these chunks, which sample `sampled` tokens and take over `copied` ones.
    `shared`: how often a table that keeps all tokens names a block that another chunk's table named before; such a
    block is read once for all."""
    pairs = kv_tokens = 0
    for window, layers in Counter(layout.windows).items():
        counted = _attended(chunks, window)
        again = shared * layout.block_size if window is None else 0
        pairs, kv_tokens = pairs + layers * counted[0], kv_tokens + layers * (counted[1] - again)
    return StepShape(sum([length for _, _, length in chunks]), sampled, pairs, kv_tokens, copied)


def _attended(chunks: list[Chunk], window: int | None) -> tuple[int, int]:
    """Count the (query, key) pairs, and the cached tokens read by each chunk alone, of one layer."""
    if window is not None:
        pairs = sum(min(at + 1, window) for c in chunks for at in range(c.start, c.end))
        return pairs, sum(min(c.end, window + c.length - 1) for c in chunks)
    starts, lengths = _columns(chunks)
    tokens = sum(starts) + sum(lengths)
    if lengths.count(1) == len(lengths):  # a query each: its keys are its pairs
        return tokens, tokens
    return sum([n * (2 * start + n + 1) // 2 for start, n in zip(starts, lengths, strict=True)]), tokens


def _columns(chunks: list[Chunk]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and lengths."""
    _, starts, lengths = zip(*chunks, strict=True) if chunks else ((), (), ())
    return starts, lengths
