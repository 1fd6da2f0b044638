"""Computes the work and memory traffic of a step from its chunks. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer_kernels.cost import StepShape


def step_shape(
    chunks: Sequence[tuple[object, int, int]],
    sampled: int,
    shared: int,
    layout: CacheLayout,
    copied: int = 0,
    causal: bool = True,
    adapters: Sequence[str] = (),
) -> StepShape:
    """Return the minimum work and memory traffic of a step.

    Args:
        chunks: Tuples of (sequence, start, length).
        sampled: The number of sampled positions.
        shared: How often a table without a window names a block that an earlier chunk's table named; such a block is
            read once.
        layout: The layout of the KV cache.
        copied: The number of copied tokens.
        causal: False for encoders, whose tokens also see later tokens.
        adapters: The adapter of each chunk, "" for none. Empty: no chunk has one.
    """
    _, starts, lengths = zip(*chunks, strict=True) if chunks else ((), (), ())
    pairs = kv_tokens = 0
    for window, layers in Counter(layout.windows).items():
        counted = _attended(starts, lengths, window)
        again = shared * layout.block_size if window is None else 0
        seen = counted[0] if causal else 2 * counted[0] - sum(lengths)  # each token sees itself once
        pairs, kv_tokens = pairs + layers * seen, kv_tokens + layers * (counted[1] - again)
    adapted = sum(length for name, length in zip(adapters, lengths, strict=bool(adapters)) if name)
    return StepShape(sum(lengths), sampled, pairs, kv_tokens, copied, adapted, len({*adapters} - {""}))


def decode_shape(
    starts: NDArray[np.int64], shared: int, layout: CacheLayout, adapters: Sequence[str] = ()
) -> StepShape:
    """Return the `step_shape` of a decode step: one sampled token per sequence, at the positions `starts`, (n,)."""
    pairs, kv_tokens, rows = 0, 0, len(starts)
    for window, layers in Counter(layout.windows).items():
        seen = int((starts + 1 if window is None else np.minimum(starts + 1, window)).sum())
        pairs += layers * seen
        kv_tokens += layers * (seen - (shared * layout.block_size if window is None else 0))
    names = [name for name in adapters if name]
    return StepShape(rows, rows, pairs, kv_tokens, 0, len(names), len({*names}))


def _attended(starts: Sequence[int], lengths: Sequence[int], window: int | None) -> tuple[int, int]:
    """Return the number of (query, key) pairs and the number of cached tokens that one layer reads, without sharing."""
    if window is not None:
        each = list(zip(starts, lengths, strict=True))
        pairs = sum(min(at + 1, window) for start, n in each for at in range(start, start + n))
        return pairs, sum(min(start + n, window + n - 1) for start, n in each)
    tokens = sum(starts) + sum(lengths)
    if lengths.count(1) == len(lengths):  # one query per chunk: as many pairs as keys
        return tokens, tokens
    return sum([n * (2 * start + n + 1) // 2 for start, n in zip(starts, lengths, strict=True)]), tokens
