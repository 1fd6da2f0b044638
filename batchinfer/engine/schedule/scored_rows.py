"""The part of a plan for prompts whose continuations are scored: it asks for log-probabilities, and for no tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchinfer.core.continuations import Branch
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.step_plan import AskedRows, SamplingPlan, ScoredTokens

_NONE = np.empty(0, np.int32)


def scored_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks that are asked for logits."""
    return [chunk for chunk in chunks if chunk.end > _branch(chunk).first]


def scored_rows(chunks: Sequence[Chunk]) -> AskedRows:
    """Ask for the log-probabilities of what may follow the tokens of these chunks."""
    rows, targets, begun = [_NONE], [_NONE], 0
    for chunk in chunks:
        branch = _branch(chunk)
        rows.append(branch.positions(chunk.start, chunk.end) + np.int32(begun - chunk.start))
        targets.append(branch.targets[branch.asked(chunk.start, chunk.end)])
        begun += chunk.length
    asked, places = np.unique(np.concatenate(rows), return_inverse=True)
    scored = ScoredTokens(places.astype(np.int32), np.concatenate(targets)) if len(asked) else None
    return AskedRows(asked.astype(np.int32), None, SamplingPlan(scored=scored, chooses=False))


def _branch(chunk: Chunk) -> Branch:
    assert chunk.sequence.scored is not None, "all sequences of an engine ask for scores, or none"
    return chunk.sequence.scored.branch
