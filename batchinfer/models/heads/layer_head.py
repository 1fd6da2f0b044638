"""The protocol of a loaded draft head that has a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class LayerHead(Protocol):
    """A draft head with a decoder layer. It drafts one token after the other, from states.

    From the state of a token and the token that follows, it computes the state of the following token, and from a state
    the next token.
    """

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Return the states of a step's tokens, (T, width).

        Args:
            tapped: (T, hidden of the model) each: the inputs of the layers that the head reads.
            hidden: (T, hidden of the model), the output of the last layer before the final norm.
        """

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Run a step, write K and V of the states to the cache, and return the next states, (T, width).

        Args:
            token_ids: (T,) int64, the tokens that follow the tokens of `states`.
            states: (T, width).
            inputs: Positions and slots of the step.
            cache: The cache of the head's layer.
            plan: The attention plan of the step.
        """

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: (n, width) → (n, width)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (n, vocab) float32 from (n, width); -inf for tokens that the head never proposes."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the argmax of the logits, (n,) int64, from (n, width); NO_TOKEN for rows that are not finite."""


class HeadWeights(Protocol):
    """The loaded weights of a LayerHead."""

    def of(self, model: Decoder, positions: int) -> LayerHead:
        """Return the head of a model, for sequences of up to `positions` tokens."""
