"""How much quantisation changes the predictions of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quality:
    """How much quantisation changes a model's predictions, measured on prompts of the job.

    Args:
        kl: The mean divergence KL(unquantised ‖ quantised) of the next token's distribution, in nats. None for a model
            without output tokens.
        top1: The share of positions at which the most likely token stays the same, 0 to 1. None like `kl`.
        positions: The number of compared positions: tokens, or vectors if the model predicts no tokens.
        cosine: The mean cosine similarity of both models' vectors. None for a model with output tokens.
    """

    kl: float | None
    top1: float | None
    positions: int
    cosine: float | None = None

    def __str__(self) -> str:
        if self.kl is None or self.top1 is None:
            return (
                f"cosine {self.cosine:.4f} to the vectors of unquantised weights, on {self.positions:,} rows"
            )
        return (
            f"KL {self.kl:.2g} nats from unquantised weights, and the same most likely token at {self.top1:.1%} of "
            f"{self.positions:,} positions"
        )
