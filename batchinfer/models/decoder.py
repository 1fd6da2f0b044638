"""A Llama-like decoder over a paged KV cache, driven by its configuration and made of `ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.checkpoint import Checkpoint
from batchinfer.models.config import ModelConfig
from batchinfer.models.rope import rope_table
from batchinfer.models.weights import CheckpointWeights, LayerWeights, Weights
from batchinfer.ops.interface import (
    AttentionInputs,
    AttentionPlan,
    DecoderLayer,
    LayerCache,
    LayerParts,
    Ops,
    RopeTable,
)


class Decoder:
    """Token ids and their places in; hidden states and, for the rows asked for, logits out.

    Holds no sequence state: the KV cache is the caller's. Call under `torch.inference_mode()`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, rope: RopeTable) -> None:
        """Packs the weights a layer at a time. `rope` must cover every position that will be run."""
        self.config = config
        self.windows = frozenset(config.windows)
        self._ops = ops
        self._rope = rope
        tables = weights.tables()
        self._embedding = tables.embedding
        self._final_norm = tables.final_norm
        self._head = ops.pack_head(tables.head)
        del tables  # or a head that was copied would be there twice while the layers are packed
        self._layers = [self._packed(weights.layer(i), config.windows[i]) for i in range(config.layers)]

    @property
    def max_positions(self) -> int:
        """Positions that the rotary table covers: the longest sequence that can be run."""
        return self._rope.cos.shape[0]

    def _packed(self, weights: LayerWeights, window: int | None) -> DecoderLayer:
        pack, config = self._ops.pack_linear, self.config
        parts = LayerParts(
            input_norm=weights.input_norm,
            qkv=pack(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=pack(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gated=self._ops.pack_gated(weights.gate_up, weights.gate_up_bias, config.activation),
            down=pack(weights.down, weights.down_bias),
            window=window,
            rope=self._rope,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_eps,
        )
        return self._ops.join_layer(parts)

    def allocate_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> list[LayerCache]:
        """A zero-filled cache for each layer."""
        config = self.config
        sizes = (blocks, config.kv_heads, block_size, config.head_dim)
        return [self._ops.allocate_cache(*sizes, dtype, device) for _ in range(config.layers)]

    def forward(
        self,
        token_ids: Tensor,
        inputs: AttentionInputs,
        caches: Sequence[LayerCache],
        plan: AttentionPlan,
    ) -> Tensor:
        """Run one step: token_ids (T,) int64 → hidden states (T, hidden) before the final norm.

        Writes K and V of the step's tokens to `caches`, one a layer. `plan` comes from
        `ops.plan_attention(inputs, block_size, decoder.windows)`. Raises ValueError for a position that the rotary
        table does not have: compiled operators would read behind it.
        """
        if max(inputs.context_lens) > self.max_positions:
            raise ValueError(
                f"a context of {max(inputs.context_lens)} tokens, and {self.max_positions} positions"
            )
        x = self._ops.embedding(token_ids, self._embedding)
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, inputs, cache, plan)
        return x if residual is None else x + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden), the rows of `forward` to sample from → (n, vocab) float32."""
        return self._head(self._normed(hidden))

    def argmax(self, hidden: Tensor) -> Tensor:
        """hidden: as for `logits` → (n,) int64, the argmax of the logits; NO_TOKEN where they are no finite numbers."""
        return self._head.argmax(self._normed(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        normed, _ = self._ops.rms_norm(hidden, self._final_norm, self.config.rms_eps)
        return normed


def load_decoder(
    checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device | str, max_positions: int
) -> Decoder:
    """Load a checked checkpoint in `dtype` onto `device`, for sequences of up to `max_positions` tokens."""
    weights = CheckpointWeights(checkpoint, dtype, device)
    rope = rope_table(checkpoint.config, max_positions, device)
    return Decoder(checkpoint.config, weights, ops, rope)
