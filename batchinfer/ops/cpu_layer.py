"""A decoder layer of compiled operators: one call instead of eight."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from batchinfer.ops.cpu_linear import CompiledLinear
from batchinfer.ops.interface import AttentionInputs, AttentionPlan, DecoderLayer, LayerCache, LayerParts
from batchinfer_kernels.cpu.attention_plan import Items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.layer import LayerRoom, LayerSizes, LayerWeights, PackedLayer, StepPlaces


class ItemPlan(AttentionPlan):
    """The step cut into pieces of work, and what its layers leave to one another."""

    padded_tokens = 0

    def __init__(self, inputs: AttentionInputs, items: Items) -> None:
        self.inputs, self.items = inputs, items
        self.room: LayerRoom | None = None


class CompiledLayer(DecoderLayer):
    """x and residual of a step stay in its plan's room, which each layer overwrites."""

    def __init__(self, compiled: CompiledOperators, parts: LayerParts) -> None:
        """All linear layers of `parts` are CompiledLinear."""
        self._compiled, self._rope = compiled, parts.rope
        qkv, o, gated, down = (
            cast(CompiledLinear, linear).weight for linear in (parts.qkv, parts.o, parts.gated, parts.down)
        )
        norms = (parts.input_norm, parts.post_norm, parts.q_norm, parts.k_norm)
        weights = LayerWeights(*norms, qkv, o, gated, down, parts.window)
        sizes = LayerSizes(parts.q_heads, parts.kv_heads, parts.head_dim, parts.scale, parts.eps)
        self._layer = PackedLayer(weights, sizes)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by the CPU's operators")
        room = plan.room
        if room is None or not self._left(room, x, residual, cache.block_size):
            room = plan.room = self._room(x, inputs, cache, plan.items)
            if residual is not None:
                room.residual.copy_(residual)
        self._compiled.decoder_layer(self._layer, room, cache.k, cache.v, residual is None)
        return room.x, room.residual

    def _left(self, room: LayerRoom, x: Tensor, residual: Tensor | None, block_size: int) -> bool:
        """Whether a layer of these sizes, with the same rotary table and blocks, left x and residual in the room."""
        same = room.places.cos is self._rope.cos and room.places.block_size == block_size
        return x is room.x and residual is room.residual and same and room.fits(self._layer)

    def _room(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache, items: Items) -> LayerRoom:
        tables, sizes = inputs.block_tables, self._layer.sizes
        places = (
            self._rope.cos,
            self._rope.sin,
            inputs.positions,
            inputs.slots,
            tables,
            items,
            cache.block_size,
        )
        shape = self._compiled.cache_shape(sizes.kv_heads, cache.block_size, sizes.head_dim)
        state = self._compiled.attention_state(items, len(x), sizes.q_heads, shape[2])
        return LayerRoom(x, self._layer, StepPlaces(*places), shape, state)
