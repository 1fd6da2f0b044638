"""A decoder over a paged KV cache, as its spec describes it, made of `ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.block import apply_norm, build_layer
from batchinfer.models.checkpoint import Checkpoint
from batchinfer.models.parameters import BIAS, FINAL_NORM
from batchinfer.models.rope import rope_table
from batchinfer.models.spec import ModelSpec
from batchinfer.models.weights import CheckpointWeights, Weights
from batchinfer.ops.interface import AttentionInputs, AttentionPlan, LayerCache, Ops, RopeTable


class Decoder:
    """Token ids and their places in; hidden states and, for the rows asked for, logits out.

    Holds no sequence state: the KV cache is the caller's. Call under `torch.inference_mode()`.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, rope: RopeTable) -> None:
        """Packs the weights a layer at a time. `rope` must cover every position that will be run."""
        self.spec = spec
        self.windows = frozenset(spec.windows)
        self._ops = ops
        self._rope = rope
        tables = weights.tables()
        self._embedding = tables.embedding
        self._final_norm = {FINAL_NORM: tables.final_norm}
        if tables.final_norm_bias is not None:
            self._final_norm[FINAL_NORM + BIAS] = tables.final_norm_bias
        self._head = ops.pack_head(tables.head)
        del tables  # or a head that was copied would be there twice while the layers are packed
        self._layers = [
            build_layer(ops, layer, weights.layer(index), rope) for index, layer in enumerate(spec.layers)
        ]

    @property
    def max_positions(self) -> int:
        """Positions that the rotary table covers: the longest sequence that can be run."""
        return self._rope.cos.shape[0]

    def allocate_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> list[LayerCache]:
        """A zero-filled cache for each layer."""
        return [
            self._ops.allocate_cache(layer.attention.cache, blocks, block_size, dtype, device)
            for layer in self.spec.layers
        ]

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
        if self.spec.embedding_multiplier != 1:
            x = x * self.spec.embedding_multiplier
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, inputs, cache, plan)
        return x if residual is None else x + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden), the rows of `forward` to sample from → (n, vocab) float32."""
        logits = self._head(self._normed(hidden))
        return logits if self.spec.logit_multiplier == 1 else logits * self.spec.logit_multiplier

    def argmax(self, hidden: Tensor) -> Tensor:
        """hidden: as for `logits` → (n,) int64, the argmax of the logits; NO_TOKEN where they are no finite numbers."""
        return self._head.argmax(self._normed(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        return apply_norm(self._ops, self.spec.final_norm, self._final_norm, FINAL_NORM, hidden)[0]


def load_decoder(
    checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device | str, max_positions: int
) -> Decoder:
    """Load a checked checkpoint in `dtype` onto `device`, for sequences of up to `max_positions` tokens."""
    weights = CheckpointWeights(checkpoint, dtype, device)
    rope = rope_table(checkpoint.spec.attention, max_positions, device)
    return Decoder(checkpoint.spec, weights, ops, rope)
