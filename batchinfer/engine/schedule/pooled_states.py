"""The part of a plan for prompts whose answers are vectors: it asks for hidden states, beside the tokens of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.scored_rows import scored_chunks
from batchinfer.engine.schedule.step_plan import AskedRows, Ints, ScoredTokens


def asked_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return those of the chunks, behind which no token is sampled, whose hidden states or scores are asked for.
    Where one sequence of an engine is scored, all are."""
    return scored_chunks(chunks) if chunks[0].sequence.scored is not None else pooled_chunks(chunks)


def pooled_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose hidden states are asked for: those that end a prompt, or begin it, or all where a mean is
    made."""
    return [chunk for chunk in chunks if _asks(chunk)]


def _asks(chunk: Chunk) -> bool:
    pooling = chunk.sequence.pooling
    if pooling == "last":
        return chunk.end == len(chunk.sequence)
    return pooling == "mean" or (pooling == "cls" and chunk.start == 0)


def with_states(chunks: Sequence[Chunk], asked: Sequence[Chunk], beside: AskedRows) -> AskedRows:
    """Ask for the states of the `asked` ones of these chunks, beside all that `beside` asks for: of the first or last
    token of each, or of all tokens, added up. All vectors of an engine have the same pooling, and are classified or
    not."""
    pooling, classified = asked[0].sequence.pooling, asked[0].sequence.classified
    spans = _spans(chunks, asked)
    if pooling == "mean":
        rows = np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in spans])
    else:
        rows = np.array([first if pooling == "cls" else end - 1 for first, end in spans], np.int32)
    sizes = [end - first if pooling == "mean" else 1 for first, end in spans]
    before = np.arange(len(chunks), dtype=np.int32) if beside.sampled is None else beside.sampled
    every = np.union1d(before, rows).astype(np.int32)
    places = np.searchsorted(every, before).astype(np.int32)
    own = beside.sampling
    chosen = places if own.chosen is None else places[own.chosen]
    sampling = replace(
        own,
        states=np.searchsorted(every, rows).tolist(),
        state_chunks=np.repeat(np.arange(len(asked)), sizes).tolist(),
        summed=pooling == "mean",
        classified=classified,
        scored=None if own.scored is None else _moved(own.scored, places),
        chosen=chosen,
        chooses=len(chosen) > 0,
    )
    return AskedRows(every, beside.counts, sampling)


def _spans(chunks: Sequence[Chunk], asked: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return from which of a step's tokens to which each of the `asked` chunks has its own."""
    wanted, found, begun = {chunk.sequence for chunk in asked}, list[tuple[int, int]](), 0
    for sequence, _, length in chunks:
        if sequence in wanted:
            found.append((begun, begun + length))
        begun += length
    return found


def _moved(scored: ScoredTokens, places: Ints) -> ScoredTokens:
    """Return what is scored behind rows that now stand at these places."""
    return scored._replace(rows=places[scored.rows])
