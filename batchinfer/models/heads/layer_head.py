"""The protocol of a loaded draft head that has a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class LayerHead(Protocol):
    """A draft head with a decoder layer (EAGLE or MTP), which drafts one token after the other.

    It computes a state per token, (width,), from the state of the previous token and the token's embedding. A state
    yields the logits of the next token. The first states are computed from hidden states of the target model.
    """

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Compute the states of a step's tokens, (T, width), from hidden states of the target model.

        Args:
            tapped: (T, hidden size of the model) each: the inputs of the model's layers that the head reads.
            hidden: (T, hidden size of the model), the output of the model's last layer before the final norm.
        """

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Compute the states of tokens, (T, width), and write their K and V to the cache.

        Args:
            token_ids: (T,) int64, the tokens.
            states: (T, width), the state of the token before each of them.
            inputs: Positions and cache slots of the tokens.
            cache: The KV cache of the head's layer.
            plan: The attention plan of the step.
        """

    def states(self, hidden: Tensor) -> Tensor:
        """Return states after the head's final norm, (n, width), from results of `forward`, (n, width)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the next token, (n, vocab) float32, from states (n, width).

        Tokens of the model that the head never proposes have -inf.
        """

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the most likely next token, (n,) int64, from states (n, width); NO_TOKEN for non-finite rows."""


class HeadWeights(Protocol):
    """The loaded weights of a draft head with a decoder layer."""

    def of(self, model: Decoder, positions: int) -> LayerHead:
        """Return the draft head on top of a target model, for sequences of up to `positions` tokens."""
