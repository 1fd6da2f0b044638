"""The protocol of a loaded draft head that has a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class LayerHead(Protocol):
    """A draft head with a decoder layer (EAGLE or MTP), which drafts tokens sequentially.

    The head computes a state per token, (width,), from the embedding of the token and the state of the token before it.
    The state of a token yields the logits of the next token. States of tokens that the target model has computed come
    from its hidden states.
    """

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Compute the head's states of a step's T tokens, (T, width), from hidden states of the target model.

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
        """Compute the head's states of T tokens, (T, width), and write the tokens' K and V to the cache.

        Args:
            token_ids: (T,) int64, the tokens.
            states: (T, width), the state of the token that precedes each of these tokens.
            inputs: Positions and cache slots of the tokens.
            cache: The KV cache of the head's layer.
            plan: What `ops.plan_attention` returned for the step.
        """

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the head's final norm to states, (n, width).

        Args:
            hidden: (n, width), results of `forward`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the next token, (n, vocab) float32. Tokens that the head never proposes have -inf.

        Args:
            hidden: (n, width), results of `forward`.
        """

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the most likely next token, (n,) int64; NO_TOKEN for rows that are not finite.

        Args:
            hidden: (n, width), results of `forward`.
        """


class HeadWeights(Protocol):
    """The loaded weights of a draft head with a decoder layer (EAGLE or MTP)."""

    def of(self, model: Decoder, positions: int) -> LayerHead:
        """Return a draft head that is ready to draft, from these weights and a target model.

        Args:
            model: The target model.
            positions: The maximum length of a sequence, for the rotary table.
        """
