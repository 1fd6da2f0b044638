"""A decoder layer, as its spec describes it."""

from __future__ import annotations

from torch import Tensor

from batchinfer.models.parameters import BIAS
from batchinfer.models.spec import LayerSpec
from batchinfer.models.weights import LayerWeights
from batchinfer.ops.interface import (
    AttentionInputs,
    AttentionPlan,
    DecoderLayer,
    LayerCache,
    LayerParts,
    Ops,
    RopeTable,
)


class Block(DecoderLayer):
    """A layer as one operator after the other."""

    def __init__(self, ops: Ops, spec: LayerSpec, parts: LayerParts) -> None:
        self._ops, self._spec, self._parts = ops, spec, parts

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        linears = self._parts.linears
        x, residual = self._normed("input_norm", x, residual)
        x = linears["o"](self._attend(linears["qkv"](x), inputs, cache, plan))
        x, residual = self._normed("post_norm", x, residual)
        return linears["down"](linears["gate_up"](x)), residual

    def _normed(self, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._ops.rms_norm(x, self._parts.norms[name], self._spec.norms[name].eps, residual)

    def _attend(self, qkv: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """(T, q, k and v above one another) → (T, q)"""
        spec, norms = self._spec.attention, self._parts.norms
        heads, kv_heads = spec.q_heads, spec.kv_heads
        qkv = qkv.view(-1, heads + 2 * kv_heads, spec.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        normed = () if spec.qk_norm is None else (norms["q_norm"], norms["k_norm"], spec.qk_norm.eps)
        q = self._ops.rope_store(q, k, v, self._parts.rope, inputs, cache, *normed)
        return self._ops.attention(q, cache, plan, spec.scale, spec.window).flatten(1)


def build_layer(ops: Ops, spec: LayerSpec, weights: LayerWeights, rope: RopeTable) -> DecoderLayer:
    """The layer, packed; in one call where the operators offer that."""
    parts = pack_layer(ops, spec, weights, rope)
    return ops.fuse(spec, parts) or Block(ops, spec, parts)


def pack_layer(ops: Ops, spec: LayerSpec, weights: LayerWeights, rope: RopeTable) -> LayerParts:
    """The layer's weights as the operators want them."""
    linears = {}
    for linear in spec.linears:
        weight, bias = weights[linear.name], weights.get(linear.name + BIAS)
        if linear.name == "gate_up":
            linears[linear.name] = ops.pack_gated(weight, bias, spec.feed_forward.activation)
        else:
            linears[linear.name] = ops.pack_linear(weight, bias)
    return LayerParts(linears, {name: weights[name] for name in spec.norms}, rope)
