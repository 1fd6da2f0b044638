"""The part of a plan for embedding and classification: hidden states as output, next to sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.scored_rows import scored_chunks
from batchinfer.engine.schedule.step_plan import Ints, OutputRows, ScoredTokens


def output_chunks_of(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose output is hidden states or scores of continuations.

    Args:
        chunks: Chunks of a step after which no token is sampled, at least one. Either all sequences of an engine score
            continuations, or none does.
    """
    return scored_chunks(chunks) if chunks[0].sequence.scored is not None else pooled_chunks(chunks)


def pooled_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose output is hidden states.

    The pooling of a sequence decides which of its chunks these are: the chunk with the last prompt token (last), the
    chunk with the first one (cls), or all chunks (mean).
    """
    return [chunk for chunk in chunks if _asks(chunk)]


def _asks(chunk: Chunk) -> bool:
    pooling = chunk.sequence.pooling
    if pooling == "last":
        return chunk.end == len(chunk.sequence)
    return pooling == "mean" or (pooling == "cls" and chunk.start == 0)


def add_states(chunks: Sequence[Chunk], output_chunks: Sequence[Chunk], base: OutputRows) -> OutputRows:
    """Add hidden states to the outputs of a step.

    The pooling decides which state of a chunk is added: of its first token (cls), of its last token (last), or the sum
    over all its tokens (mean).

    Args:
        chunks: All chunks of the step.
        output_chunks: The chunks whose output is hidden states, all with the same pooling.
        base: The outputs of the step without hidden states.

    Returns:
        The outputs of the step with hidden states.
    """
    pooling, classified = output_chunks[0].sequence.pooling, output_chunks[0].sequence.classified
    spans = _spans(chunks, output_chunks)
    if pooling == "mean":
        rows = np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in spans])
    else:
        rows = np.array([first if pooling == "cls" else end - 1 for first, end in spans], np.int32)
    sizes = [end - first if pooling == "mean" else 1 for first, end in spans]
    before = np.arange(len(chunks), dtype=np.int32) if base.sampled is None else base.sampled
    every = np.union1d(before, rows).astype(np.int32)
    places = np.searchsorted(every, before).astype(np.int32)
    own = base.sampling
    chosen = places if own.chosen is None else places[own.chosen]
    sampling = replace(
        own,
        states=np.searchsorted(every, rows).tolist(),
        state_chunks=np.repeat(np.arange(len(output_chunks)), sizes).tolist(),
        summed=pooling == "mean",
        classified=classified,
        scored=None if own.scored is None else _moved(own.scored, places),
        chosen=chosen,
        chooses=len(chosen) > 0,
    )
    return OutputRows(every, base.counts, sampling)


def _spans(chunks: Sequence[Chunk], output_chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    wanted, found, offset = {chunk.sequence for chunk in output_chunks}, list[tuple[int, int]](), 0
    for sequence, _, length in chunks:
        if sequence in wanted:
            found.append((offset, offset + length))
        offset += length
    return found


def _moved(scored: ScoredTokens, places: Ints) -> ScoredTokens:
    return scored._replace(rows=places[scored.rows])
