"""Names of what the requests of an engine ask for: one thing at a time."""

from __future__ import annotations

from batchinfer.core.sampling import SamplingParams

TOKENS, SCORES = "tokens", "scores"
OF_WHOLE_PROMPTS = tuple(  # of hidden states that the cache does not have
    f"{what} ({pooling})" for what in ("vectors", "logits") for pooling in ("mean", "cls")
)


def answer_of(params: SamplingParams) -> str:
    """Say what a request with these parameters asks for."""
    if params.scored:
        return SCORES
    if params.pooling is None:
        return TOKENS
    return f"{'logits' if params.classified else 'vectors'} ({params.pooling})"
