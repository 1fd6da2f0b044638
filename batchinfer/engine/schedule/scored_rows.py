"""The part of a plan for tokens that are scored: those of continuations, where nothing is asked for but their
log-probabilities, and those of prompts, behind which others are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchinfer.core.continuations import Branch
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.step_plan import AskedRows, Ints, SamplingPlan, ScoredTokens

_NONE = np.empty(0, np.int32)


def scored_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks that are asked for logits."""
    return [chunk for chunk in chunks if chunk.end > _branch(chunk).first]


def scored_rows(chunks: Sequence[Chunk]) -> AskedRows:
    """Ask for the log-probabilities of what may follow the tokens of these chunks."""
    rows, targets = _asked(chunks, [_branch(chunk) for chunk in chunks])
    asked, places = np.unique(rows, return_inverse=True)
    scored = ScoredTokens(places.astype(np.int32), targets) if len(asked) else None
    return AskedRows(asked.astype(np.int32), None, SamplingPlan(scored=scored, chooses=False))


def prompt_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose tokens are scored because the log-probabilities of their prompts are asked for, and not
    known yet."""
    reading = ((chunk, chunk.sequence.prompt_scores) for chunk in chunks)
    return [c for c, scores in reading if scores is not None and scores.lacks(c.start, c.end)]


def with_prompts(
    chunks: Sequence[Chunk], read: Sequence[Chunk], sampled: Ints | None, beside: AskedRows
) -> AskedRows:
    """Ask for the log-probabilities of prompts beside the tokens that `beside` asks for of the rows `sampled`; None: of
    all. `read`: the chunks with tokens of these prompts."""
    asking = {chunk.sequence: chunk.sequence.prompt_scores for chunk in read}
    branches = [None if (own := asking.get(c.sequence)) is None else own.branch for c in chunks]
    rows, targets = _asked(chunks, branches)
    chosen = np.arange(len(chunks), dtype=np.int32) if sampled is None else sampled
    asked = np.union1d(rows, chosen).astype(np.int32)
    most = max(own.likeliest for own in asking.values() if own is not None)
    scored = ScoredTokens(np.searchsorted(asked, rows).astype(np.int32), targets, most)
    places = np.searchsorted(asked, chosen).astype(np.int32)
    sampling = replace(beside.sampling, scored=scored, chosen=places, chooses=len(places) > 0)
    return AskedRows(asked, beside.counts, sampling)


def _asked(chunks: Sequence[Chunk], branches: Sequence[Branch | None]) -> tuple[Ints, Ints]:
    """Return behind which tokens of a step something is scored, and the tokens that are."""
    rows, targets, begun = [_NONE], [_NONE], 0
    for (_, start, length), branch in zip(chunks, branches, strict=True):
        if branch is not None:
            rows.append(branch.positions(start, start + length) + np.int32(begun - start))
            targets.append(branch.targets[branch.asked(start, start + length)])
        begun += length
    return np.concatenate(rows), np.concatenate(targets)


def _branch(chunk: Chunk) -> Branch:
    assert chunk.sequence.scored is not None, "all sequences of an engine ask for scores, or none"
    return chunk.sequence.scored.branch
