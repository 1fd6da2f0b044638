"""The part of a plan for prompts whose answers are vectors: it asks for hidden states, and for no tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.step_plan import AskedRows, SamplingPlan

_NONE = np.empty(0, np.int32)


def pooled_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose hidden states are asked for: those that end a prompt, or begin it, or all where a mean is
    made. All sequences of an engine have the same pooling, and are classified or not."""
    pooling = chunks[0].sequence.pooling
    if pooling == "mean":
        return [*chunks]
    if pooling == "cls":
        return [chunk for chunk in chunks if chunk.start == 0]
    return [chunk for chunk in chunks if chunk.end == len(chunk.sequence)]


def pooled_rows(chunks: Sequence[Chunk], asked: Sequence[Chunk]) -> AskedRows:
    """Ask for the states of these chunks: of the first or last token of each, or of all tokens, added up."""
    if not asked:
        return AskedRows(_NONE, None, SamplingPlan(chooses=False))
    classified = chunks[0].sequence.classified
    lengths = [chunk.length for chunk in chunks]
    if chunks[0].sequence.pooling == "mean":
        pools = np.repeat(np.arange(len(lengths)), lengths).tolist()
        rows = np.arange(len(pools), dtype=np.int32)
        plan = SamplingPlan(states=rows.tolist(), pools=pools, chooses=False, classified=classified)
        return AskedRows(rows, lengths, plan)
    ends = np.cumsum(lengths, dtype=np.int32)
    rows = ends - np.array(lengths, np.int32) if chunks[0].sequence.pooling == "cls" else ends - np.int32(1)
    kept = {id(chunk.sequence) for chunk in asked}
    chosen = [id(chunk.sequence) in kept for chunk in chunks]
    plan = SamplingPlan(states=[*range(len(asked))], chooses=False, classified=classified)
    return AskedRows(rows[chosen], None, plan)
