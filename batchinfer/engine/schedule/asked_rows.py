"""The chunks of which something else than tokens is asked: hidden states or log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.engine.schedule.pooled_states import pooled_chunks
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.scored_rows import scored_chunks


def asked_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return those of the chunks, behind which no token is sampled, whose hidden states or scores are asked for.
    Where one sequence of an engine is scored, all are."""
    return scored_chunks(chunks) if chunks[0].sequence.scored is not None else pooled_chunks(chunks)
