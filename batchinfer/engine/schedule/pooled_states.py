"""The part of a plan for prompts whose answers are vectors: it asks for hidden states, and for no tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.step_plan import AskedRows, SamplingPlan

_NONE = np.empty(0, np.int32)


def pooled_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose hidden states are asked for: those that end a prompt, or all where a mean is made. All
    sequences of an engine have the same pooling."""
    every = chunks[0].sequence.pooling == "mean"
    return [chunk for chunk in chunks if every or chunk.end == len(chunk.sequence)]


def pooled_rows(chunks: Sequence[Chunk], asked: Sequence[Chunk]) -> AskedRows:
    """Ask for the states of these chunks: of the last token of each, or of all tokens, added up."""
    if not asked:
        return AskedRows(_NONE, None, SamplingPlan(chooses=False))
    lengths = [chunk.length for chunk in chunks]
    if chunks[0].sequence.pooling == "mean":
        pools = np.repeat(np.arange(len(lengths)), lengths).tolist()
        rows = np.arange(len(pools), dtype=np.int32)
        return AskedRows(rows, lengths, SamplingPlan(states=rows.tolist(), pools=pools, chooses=False))
    ends = np.cumsum(lengths, dtype=np.int32) - np.int32(1)
    last = [chunk.end == len(chunk.sequence) for chunk in chunks]
    return AskedRows(ends[last], None, SamplingPlan(states=[*range(len(asked))], chooses=False))
