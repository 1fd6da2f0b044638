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
    """Return the numbers from which the minimum work and memory traffic of a step are computed.

    Args:
        chunks: The tokens that the step runs, as (sequence, position of the first token, number of tokens).
        sampled: The number of positions after which tokens are sampled.
        shared: The number of blocks that need not be read, because an earlier chunk reads the same block. Only one
            block table without a sliding window is counted.
        layout: The layout of the KV cache.
        copied: The number of tokens whose keys and values are copied from other blocks.
        causal: False for encoders, whose tokens also attend to later tokens.
        adapters: The fingerprint of each chunk's LoRA adapter, "" for none. Empty: no chunk has an adapter.
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
    """Return the result of `step_shape` for a decode step, in less time.

    Each of n sequences runs one token and samples one token.

    Args:
        starts: [n], the position of the token that each sequence runs.
        shared: The number of blocks that need not be read, because an earlier sequence reads the same block. Only one
            block table without a sliding window is counted.
        layout: The layout of the KV cache.
        adapters: The fingerprint of each sequence's LoRA adapter, "" for none. Empty: no sequence has an adapter.
    """
    pairs, kv_tokens, rows = 0, 0, len(starts)
    for window, layers in Counter(layout.windows).items():
        seen = int((starts + 1 if window is None else np.minimum(starts + 1, window)).sum())
        pairs += layers * seen
        kv_tokens += layers * (seen - (shared * layout.block_size if window is None else 0))
    names = [name for name in adapters if name]
    return StepShape(rows, rows, pairs, kv_tokens, 0, len(names), len({*names}))


def _attended(starts: Sequence[int], lengths: Sequence[int], window: int | None) -> tuple[int, int]:
    if window is not None:
        each = list(zip(starts, lengths, strict=True))
        pairs = sum(min(at + 1, window) for start, n in each for at in range(start, start + n))
        return pairs, sum(min(start + n, window + n - 1) for start, n in each)
    tokens = sum(starts) + sum(lengths)
    if lengths.count(1) == len(lengths):  # one query per chunk: as many pairs as keys
        return tokens, tokens
    return sum([n * (2 * start + n + 1) // 2 for start, n in zip(starts, lengths, strict=True)]), tokens
