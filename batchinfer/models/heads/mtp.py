"""The layer for multi-token prediction (MTP) of DeepSeek-V3 (DeepSeek-AI, 2024, 2.2).

It is one more layer of the model, which reads the embedding of a token next to the state of the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.decoder.block import build_layer, pack_layer
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.positions import rope_table
from batchinfer.models.heads.stored_mtp import EMBEDDING_NORM, FUSE, NORM, STATE_NORM, StoredMtp
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import DecoderLayer, LayerParts, Linear


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """The loaded weights of an MTP layer (multi-token prediction), packed for its operators.

    Args:
        stored: Where the layer is in its checkpoint.
        ops: The operators.
        parts: The packed weights of the decoder layer.
        norms: The weights of three norms by name: of the token's embedding, of the previous token's state, and of the
            layer's output.
        fuse: Computes the layer's input from the normed embedding and the normed state.
    """

    stored: StoredMtp
    ops: Ops
    parts: LayerParts
    norms: Mapping[str, Tensor]
    fuse: Linear

    @classmethod
    def load(cls, stored: StoredMtp, ops: Ops, dtype: torch.dtype, device: torch.device) -> MtpWeights:
        """Load the weights of an MTP layer.

        Args:
            stored: Where the layer is in its checkpoint.
            ops: The operators for which the weights are packed.
            dtype: The dtype of the target model.
            device: The device of the target model.
        """
        weights, start = CheckpointWeights(stored.checkpoint, dtype, device), stored.start
        return cls(
            stored,
            ops,
            pack_layer(ops, stored.spec.layers[0], weights.layer(stored.index)),
            {name: weights.tensor(f"{start}{name}.weight") for name in (EMBEDDING_NORM, STATE_NORM, NORM)},
            ops.pack_linear(weights.tensor(f"{start}{FUSE}.weight"), None),
        )

    def of(self, model: Decoder, positions: int) -> MtpHead:
        """Return an MTP layer with these weights on top of its model, ready to draft tokens.

        Args:
            model: The target model, whose embedding and output layer are used.
            positions: The maximum number of tokens of a sequence.
        """
        layer = self.stored.spec.layers[0]
        assert layer.rotation is not None, "a layer with attention rotates its heads"
        rope = rope_table(layer.rotation, positions, self.norms[NORM].device)
        return MtpHead(self, build_layer(self.ops, layer, replace(self.parts, rope=rope)), model)


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """An MTP layer (multi-token prediction) on top of its model, ready to draft tokens.

    As in SGLang, states are normed. `input_states` uses the model's final norm, and `forward` uses this layer's norm.

    Args:
        weights: The weights of the layer.
        layer: The decoder layer.
        model: The target model, whose embedding and output layer are used.
    """

    weights: MtpWeights
    layer: DecoderLayer
    model: Decoder

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Return the layer's states of T tokens, (T, hidden): the model's hidden states after its final norm.

        Args:
            tapped: Not used.
            hidden: (T, hidden), the output of the model's last layer before the final norm.
        """
        return self.model.states(hidden)

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return the layer's states of T tokens, (T, hidden), and write the tokens' K and V to its KV cache.

        Args:
            token_ids: (T,) int64, the tokens.
            states: (T, hidden), for each token, the state of the token before it.
            inputs: Positions and cache slots of the tokens.
            cache: The KV cache of the MTP layer.
            plan: The result of `ops.plan_attention` for the step.
        """
        embedded = self.weights.ops.embedding(token_ids, self.model.embedding)
        both = self._apply_norm(EMBEDDING_NORM, embedded), self._apply_norm(STATE_NORM, states)
        x, residual = self.layer(self.weights.fuse(torch.cat(both, -1)), None, inputs, cache, plan)
        return self._apply_norm(NORM, x, residual)

    def states(self, hidden: Tensor) -> Tensor:
        """Return `hidden` unchanged, because `forward` has applied the final norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, (n, vocab), from the model's output layer.

        Args:
            hidden: (n, hidden), states from `forward`.
        """
        return self.model.head(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the most likely next token, (n,); NO_TOKEN if its logit is not finite.

        Args:
            hidden: (n, hidden), states from `forward`.
        """
        return self.model.head.argmax(hidden)

    def _apply_norm(self, name: str, x: Tensor, residual: Tensor | None = None) -> Tensor:
        norm = self.weights.stored.spec.final_norm
        assert norm is not None, "all of its norms are alike"
        return self.weights.ops.norm(norm, self.weights.norms, name, x, residual)[0]
