"""Counts what a step runs and reads, from its chunks. Ints only."""

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
    """The least work and memory traffic of chunks, each of tokens [start, start + length) of whatever it names first.

    They sample `sampled` tokens and take over `copied` ones. `shared`: how often a table that keeps all tokens names a
    block that another chunk's table named before; such a block is read once for all. Not `causal`: they are whole
    prompts, whose tokens see later ones, too. `adapters`: of each chunk, "" for none; or none of them has one.
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
    """Return what `step_shape` does for a step of a single token of each sequence, at these positions, all of which are
    sampled."""
    pairs, kv_tokens, rows = 0, 0, len(starts)
    for window, layers in Counter(layout.windows).items():
        seen = int((starts + 1 if window is None else np.minimum(starts + 1, window)).sum())
        pairs += layers * seen
        kv_tokens += layers * (seen - (shared * layout.block_size if window is None else 0))
    names = [name for name in adapters if name]
    return StepShape(rows, rows, pairs, kv_tokens, 0, len(names), len({*names}))


def _attended(starts: Sequence[int], lengths: Sequence[int], window: int | None) -> tuple[int, int]:
    """Count the (query, key) pairs, and the cached tokens read by each chunk alone, of one layer."""
    if window is not None:
        each = list(zip(starts, lengths, strict=True))
        pairs = sum(min(at + 1, window) for start, n in each for at in range(start, start + n))
        return pairs, sum(min(start + n, window + n - 1) for start, n in each)
    tokens = sum(starts) + sum(lengths)
    if lengths.count(1) == len(lengths):  # a query each: its keys are its pairs
        return tokens, tokens
    return sum([n * (2 * start + n + 1) // 2 for start, n in zip(starts, lengths, strict=True)]), tokens
