"""The protocol of a loaded draft head that has a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache


class LayerHead(Protocol):
    """A draft head with a decoder layer (EAGLE or MTP), which drafts one token after the other.

    The head has a state per token, (width,), which yields the logits of the next token. `forward` computes it from the
    embedding of the token and the state of the token before. For tokens that the target model has run, `input_states`
    computes it from the hidden states of the model.
    """

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Return the draft head's states of T tokens, (T, width), computed from the target model's hidden states.

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
        """Return the head's states of T tokens, (T, width), and write the tokens' K and V to the head's KV cache.

        Args:
            token_ids: (T,) int64, the tokens.
            states: (T, width), for each token, the state of the token before it.
            inputs: Positions and cache slots of the tokens.
            cache: The KV cache of the head.
            plan: The result of `ops.plan_attention` for the step.
        """

    def states(self, hidden: Tensor) -> Tensor:
        """Return states after the head's final norm, (n, width).

        Args:
            hidden: (n, width), states from `forward`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, (n, vocab) float32. Tokens that the head never proposes have -inf.

        Args:
            hidden: (n, width), states from `forward`.
        """

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the most likely next token, (n,) int64; NO_TOKEN if its logit is not finite.

        Args:
            hidden: (n, width), states from `forward`.
        """


class HeadWeights(Protocol):
    """The loaded weights of a draft head with a decoder layer (EAGLE or MTP)."""

    def of(self, model: Decoder, positions: int) -> LayerHead:
        """Return a draft head with these weights on top of a target model, ready to draft tokens.

        Args:
            model: The target model.
            positions: The maximum number of tokens of a sequence.
        """
