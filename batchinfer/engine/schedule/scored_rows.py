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
    """Return the chunks whose logits are needed to score continuations.

    Chunks that only run tokens of the context, before the continuations, are left out.

    Args:
        chunks: Chunks of sequences that score continuations.
    """
    return [chunk for chunk in chunks if chunk.end > _branch(chunk).first]


def scored_rows(chunks: Sequence[Chunk]) -> OutputRows:
    """Return the outputs of a step that scores continuations and samples no token.

    Args:
        chunks: All chunks of the step.
    """
    rows, targets = _asked(chunks, [_branch(chunk) for chunk in chunks])
    asked, places = np.unique(rows, return_inverse=True)
    scored = ScoredTokens(places.astype(np.int32), targets) if len(asked) else None
    return OutputRows(asked.astype(np.int32), None, SamplingPlan(scored=scored, chooses=False))


def prompt_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks in which log-probabilities of prompt tokens must be computed.

    The request asks for them, and they have not been computed before.

    Args:
        chunks: Chunks of a step.
    """
    reading = ((chunk, chunk.sequence.prompt_scores) for chunk in chunks)
    return [c for c, scores in reading if scores is not None and scores.needs(c.start, c.end)]


def add_prompt_scores(
    chunks: Sequence[Chunk], read: Sequence[Chunk], sampled: Ints | None, base: OutputRows
) -> OutputRows:
    """Add log-probabilities of prompt tokens to the outputs of a step.

    Args:
        chunks: All chunks of the step.
        read: The chunks in which log-probabilities of prompt tokens must be computed.
        sampled: The indices of the step's tokens after which a token is sampled. None: all tokens.
        base: The outputs of the step without log-probabilities of prompt tokens.

    Returns:
        The outputs of the step with log-probabilities of prompt tokens.
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
    """Return which log-probabilities a step must compute.

    Args:
        chunks: All chunks of the step.
        branches: For each chunk, the tokens to score at each position of its sequence. None: the chunk scores no
            token.

    Returns:
        Two arrays [n]: the index of the step's token whose logits are used, and the token to score.
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
