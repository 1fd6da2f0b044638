"""The protocol of a head with a layer of its own, once it is on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class LayerHead(Protocol):
    """Makes of a token's state and of the token behind it the state of that one, and of a state the next token."""

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Make the states of a step's tokens: tapped, (T, hidden of the model) each, what its layers read that the head
        asks for, and hidden, what the last one gave, before the final norm → (T, width)."""

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Run a step: token_ids (T,) int64, those behind the tokens whose states, (T, width), are given → (T, width).
        Writes K and V of the states to the cache."""

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the last norm: (n, width) → (n, width)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the logits of all tokens of the model: (n, width) → (n, vocab) float32, -inf for those that the head
        never proposes."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the logits, (n, width) → (n,) int64; NO_TOKEN where they are not finite numbers."""


class HeadWeights(Protocol):
    """The weights of such a head."""

    def of(self, model: Decoder, positions: int) -> LayerHead:
        """Make the head of a model, for sequences of up to so many tokens."""
