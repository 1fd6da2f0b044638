"""A Llama-like decoder over a paged KV cache, driven by its configuration and made of `ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.checkpoint import Checkpoint
from batchinfer.models.config import ModelConfig
from batchinfer.models.rope import rope_table
from batchinfer.models.weights import CheckpointWeights, LayerWeights, Weights
from batchinfer.ops.interface import AttentionInputs, AttentionPlan, LayerCache, Linear, Ops, RopeTable


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A layer's weights as the operators want them."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gated: Linear
    down: Linear
    window: int | None


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
        self._scale = config.head_dim**-0.5
        tables = weights.tables()
        self._embedding = tables.embedding
        self._final_norm = tables.final_norm
        self._head = ops.pack_head(tables.head)
        self._layers = [self._packed(weights.layer(i), config.windows[i]) for i in range(config.layers)]

    @property
    def max_positions(self) -> int:
        """Positions that the rotary table covers: the longest sequence that can be run."""
        return self._rope.cos.shape[0]

    def _packed(self, weights: LayerWeights, window: int | None) -> _Layer:
        pack = self._ops.pack_linear
        return _Layer(
            input_norm=weights.input_norm,
            qkv=pack(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=pack(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gated=self._ops.pack_gated(weights.gate_up, weights.gate_up_bias, self.config.activation),
            down=pack(weights.down, weights.down_bias),
            window=window,
        )

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
        `ops.plan_attention(inputs, block_size, decoder.windows)`.
        """
        x = self._ops.embedding(token_ids, self._embedding)
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = self._ops.rms_norm(x, layer.input_norm, self.config.rms_eps, residual)
            x = self._attend(layer, x, inputs, cache, plan)
            x, residual = self._ops.rms_norm(x, layer.post_norm, self.config.rms_eps, residual)
            x = layer.down(layer.gated(x))
        return x if residual is None else x + residual

    def _attend(
        self, layer: _Layer, x: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan
    ) -> Tensor:
        heads, kv_heads = self.config.q_heads, self.config.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        norms = (layer.q_norm, layer.k_norm)
        q = self._ops.rope_store(q, k, v, self._rope, inputs, cache, *norms, self.config.rms_eps)
        return layer.o(self._ops.attention(q, cache, plan, self._scale, layer.window).flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden), the rows of `forward` to sample from → (n, vocab) float32."""
        return self._head(self._normed(hidden))

    def likeliest(self, hidden: Tensor) -> Tensor:
        """hidden: as for `logits` → (n,) int64, the argmax of the logits; NO_TOKEN where they are no finite numbers."""
        return self._head.likeliest(self._normed(hidden))

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
