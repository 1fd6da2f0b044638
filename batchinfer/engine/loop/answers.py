"""Names of what the requests of an engine ask for: one thing at a time, or tokens and vectors."""

from __future__ import annotations

from collections.abc import Collection

from batchinfer.core.sampling import SamplingParams

TOKENS, SCORES, VECTORS = "tokens", "scores", "vectors"


def answer_of(params: SamplingParams) -> str:
    """Say what a request with these parameters asks for."""
    if params.scored:
        return SCORES
    if params.pooling is None:
        return TOKENS
    return f"{'logits' if params.classified else VECTORS} ({params.pooling})"


def go_together(answers: Collection[str]) -> bool:
    """Say whether requests for all of these may be unfinished at once: a step makes vectors in one way only."""
    others = [one for one in answers if one != TOKENS]
    return len(answers) == 1 or (len(others) == 1 and others[0].startswith(VECTORS))
