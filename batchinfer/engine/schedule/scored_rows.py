"""The part of a plan for scored tokens: of continuations, which only need scores, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchinfer.core.continuations import Branch
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.step_plan import Ints, OutputRows, SamplingPlan, ScoredTokens

_NONE = np.empty(0, np.int32)


def scored_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks of scored continuations whose logits are needed: not only tokens of the context.

    Args:
        chunks: Chunks of sequences that score continuations.
    """
    return [chunk for chunk in chunks if chunk.end > _branch(chunk).first]


def scored_rows(chunks: Sequence[Chunk]) -> OutputRows:
    """Return the outputs of a step that scores continuations, and samples no token.

    Args:
        chunks: All chunks of the step.
    """
    rows, targets = _asked(chunks, [_branch(chunk) for chunk in chunks])
    asked, places = np.unique(rows, return_inverse=True)
    scored = ScoredTokens(places.astype(np.int32), targets) if len(asked) else None
    return OutputRows(asked.astype(np.int32), None, SamplingPlan(scored=scored, chooses=False))


def prompt_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks with prompt tokens whose log-probabilities are requested and not computed yet."""
    reading = ((chunk, chunk.sequence.prompt_scores) for chunk in chunks)
    return [c for c, scores in reading if scores is not None and scores.needs(c.start, c.end)]


def add_prompt_scores(
    chunks: Sequence[Chunk], read: Sequence[Chunk], sampled: Ints | None, base: OutputRows
) -> OutputRows:
    """Return a step's outputs with the log-probabilities of prompts added.

    Args:
        chunks: All chunks of the step.
        read: The chunks of the prompts whose log-probabilities are added.
        sampled: The indices of the step's tokens after which a token is sampled. None: all tokens.
        base: The outputs of the step without log-probabilities of prompts.
    """
    asking = {chunk.sequence: chunk.sequence.prompt_scores for chunk in read}
    branches = [None if (own := asking.get(c.sequence)) is None else own.branch for c in chunks]
    rows, targets = _asked(chunks, branches)
    chosen = np.arange(len(chunks), dtype=np.int32) if sampled is None else sampled
    asked = np.union1d(rows, chosen).astype(np.int32)
    most = max(own.likeliest for own in asking.values() if own is not None)
    scored = ScoredTokens(np.searchsorted(asked, rows).astype(np.int32), targets, most)
    places = np.searchsorted(asked, chosen).astype(np.int32)
    sampling = replace(base.sampling, scored=scored, chosen=places, chooses=len(places) > 0)
    return OutputRows(asked, base.counts, sampling)


def _asked(chunks: Sequence[Chunk], branches: Sequence[Branch | None]) -> tuple[Ints, Ints]:
    """Return the indices of the step's tokens whose logits score a token, and the scored tokens: two arrays [n].

    Args:
        chunks: All chunks of the step.
        branches: The tokens to score after each position of a chunk's sequence. None: the chunk scores no token.
    """
    rows, targets, offset = [_NONE], [_NONE], 0
    for (_, start, length), branch in zip(chunks, branches, strict=True):
        if branch is not None:
            rows.append(branch.positions(start, start + length) + np.int32(offset - start))
            targets.append(branch.targets[branch.asked(start, start + length)])
        offset += length
    return np.concatenate(rows), np.concatenate(targets)


def _branch(chunk: Chunk) -> Branch:
    assert chunk.sequence.scored is not None, "all sequences of an engine ask for scores, or none"
    return chunk.sequence.scored.branch
