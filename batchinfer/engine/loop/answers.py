"""Names of what the requests of an engine ask for: one thing at a time."""

from __future__ import annotations

from batchinfer.core.sampling import SamplingParams

TOKENS, SCORES = "tokens", "scores"
OF_WHOLE_PROMPTS = ("vectors (mean)", "vectors (cls)")  # of hidden states that the cache does not have


def answer_of(params: SamplingParams) -> str:
    """Say what a request with these parameters asks for."""
    if params.scored:
        return SCORES
    return TOKENS if params.pooling is None else f"vectors ({params.pooling})"
