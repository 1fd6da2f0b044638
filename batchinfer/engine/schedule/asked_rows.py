"""The part of a plan for prompts whose answers are no texts: hidden states or log-probabilities, and no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.engine.schedule.pooled_states import pooled_chunks, pooled_rows
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.scored_rows import scored_chunks, scored_rows
from batchinfer.engine.schedule.step_plan import AskedRows


def asked_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks that something is asked of. All sequences of an engine ask for the same: where that is tokens,
    there are none."""
    first = chunks[0].sequence
    if first.pooling is not None:
        return pooled_chunks(chunks)
    return scored_chunks(chunks) if first.scored is not None else []


def asked_rows(chunks: Sequence[Chunk]) -> AskedRows | None:
    """Return what is asked of the chunks of a step; None: tokens."""
    first = chunks[0].sequence
    if first.pooling is not None:
        return pooled_rows(chunks, pooled_chunks(chunks))
    return scored_rows(chunks) if first.scored is not None else None
