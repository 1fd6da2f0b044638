"""A decoder layer, as its spec describes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchinfer.models.feed_forward import feed_forward, pack_experts
from batchinfer.models.parameters import BIAS, norm_parameters
from batchinfer.models.spec import LayerSpec, LinearSpec, NormSpec
from batchinfer.models.weights import LayerWeights
from batchinfer.ops.interface import (
    AttentionInputs,
    AttentionPlan,
    DecoderLayer,
    LayerCache,
    LayerParts,
    Linear,
    Ops,
    RopeTable,
)


class Block(DecoderLayer):
    """A layer as one operator after the other."""

    def __init__(self, ops: Ops, spec: LayerSpec, parts: LayerParts) -> None:
        self._ops, self._spec, self._parts = ops, spec, parts
        self._norms = spec.norms
        self.loads = None if parts.experts is None else parts.experts.loads

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        linears = self._parts.linears
        x, residual = self._before("input_norm", x, residual)
        attended = linears["o"](self._attend(linears["qkv"](x), inputs, cache, plan))
        attended = self._after("attention_norm", attended)
        if self._spec.parallel:
            x = self._before("post_norm", residual, None)[0] if "post_norm" in self._norms else x
            return attended + self._feed(x, inputs), residual
        x, residual = self._before("post_norm", attended, residual)
        return self._feed(x, inputs), residual

    def _feed(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """The feed-forward half, from what its norm gave to what is added to the residual."""
        x = feed_forward(self._ops, self._spec, self._parts, x, inputs)
        return self._after("feed_forward_norm", x)

    def _before(self, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What goes into a half of the layer, and x + residual."""
        if name in self._norms:
            return apply_norm(self._ops, self._norms[name], self._parts.norms, name, x, residual)
        total = x if residual is None else x + residual
        return total, total

    def _after(self, name: str, x: Tensor) -> Tensor:
        """What comes out of it, to be added."""
        if name in self._norms:
            x, _ = apply_norm(self._ops, self._norms[name], self._parts.norms, name, x)
        return x if self._spec.residual_multiplier == 1 else x * self._spec.residual_multiplier

    def _attend(self, qkv: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """(T, q, k and v above one another) → (T, q)"""
        spec, norms = self._spec.attention, self._parts.norms
        heads, kv_heads = spec.q_heads, spec.kv_heads
        if spec.q_norm is not None and not spec.norms_heads:
            self._norm_apart(qkv)
        qkv = qkv.view(-1, heads + 2 * kv_heads, spec.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        each = _each_head(spec.q_norm, norms) if spec.norms_heads else ()
        q = self._ops.rope_store(q, k, v, self._parts.rope, inputs, cache, *each)
        rules = (spec.scale, spec.window, spec.soft_cap)
        return self._ops.attention(q, cache, plan, *rules).flatten(1)

    def _norm_apart(self, qkv: Tensor) -> None:
        """Norms q and k in place, before they are rotated."""
        spec = self._spec.attention
        for name, start, width in (("q_norm", 0, spec.q_width), ("k_norm", spec.q_width, spec.kv_width)):
            norm, part = self._norms[name], qkv[:, start : start + width]
            stretches = part.view(len(part), -1, norm.width)
            normed, _ = apply_norm(self._ops, norm, self._parts.norms, name, stretches.contiguous())
            stretches.copy_(normed)


def _each_head(
    norm: NormSpec | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, float, float]:
    """What `rope_store` takes to norm each head."""
    assert norm is not None
    return parameters["q_norm"], parameters["k_norm"], norm.eps, norm.offset


def apply_norm(
    ops: Ops,
    norm: NormSpec,
    parameters: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), with the parameters of this name."""
    weight, bias = parameters[name], parameters.get(name + BIAS)
    if norm.kind == "layer":
        return ops.layer_norm(x, weight, bias, norm.eps, residual)
    return ops.rms_norm(x, weight, norm.eps, residual, norm.offset)


def build_layer(ops: Ops, spec: LayerSpec, weights: LayerWeights, rope: RopeTable) -> DecoderLayer:
    """The layer, packed; in one call where the operators offer that."""
    parts = pack_layer(ops, spec, weights, rope)
    return ops.fuse(spec, parts) or Block(ops, spec, parts)


def pack_layer(ops: Ops, spec: LayerSpec, weights: LayerWeights, rope: RopeTable) -> LayerParts:
    """The layer's weights as the operators want them."""
    linears = {
        linear.name: _packed(ops, linear, weights[linear.name], weights.get(linear.name + BIAS))
        for linear in spec.linears
        if not linear.experts
    }
    norms = [parameter for name, norm in spec.norms.items() for parameter in norm_parameters(name, norm)]
    return LayerParts(
        linears,
        {name: weights[name] for name in norms},
        rope,
        pack_experts(ops, spec, weights),
        {name: weights[name] for name in spec.vectors},
    )


def _packed(ops: Ops, linear: LinearSpec, weight: Tensor, bias: Tensor | None) -> Linear:
    if linear.exact:
        return ops.pack_exact(weight, bias)
    if linear.activation is None:
        return ops.pack_linear(weight, bias)
    pack = ops.pack_gated if linear.gated else ops.pack_activated
    return pack(weight, bias, linear.activation)
