"""A decoder layer, built from its spec."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.decoder.attention import AttentionHalf, attention_half, pack_latent_heads
from batchinfer.models.decoder.feed_forward import feed_forward, pack_experts
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache, RopeTable
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import (
    AdapterRoom,
    Adapters,
    CodedWeight,
    DecoderLayer,
    Factors,
    LayerParts,
    Linear,
    SparseWeight,
    Weight,
)
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.parallel.sharded_ops import SUMMED, SummedLinear
from batchinfer.models.spec.parameters import BIAS, FACTOR_A, FACTOR_B, LINES, SCALES, ZEROS, norm_parameters
from batchinfer.models.spec.spec import LayerSpec, LinearSpec


class Block(DecoderLayer):
    """A decoder layer that calls an operator for each of its parts. A fused layer is a single operator instead."""

    def __init__(self, ops: Ops, spec: LayerSpec, parts: LayerParts) -> None:
        self._ops, self._spec, self._parts = ops, spec, parts
        self._norms, self._attention = spec.norms, attention_half(ops, spec.attention, parts)
        self.loads = None if parts.experts is None else parts.experts.loads

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache | None,
        plan: AttentionPlan | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for a step's T tokens. Its input is x + residual.

        Args:
            x: (T, hidden).
            residual: (T, hidden). None: x is the whole input.
            inputs: Positions and cache slots of the step's tokens.
            cache: The KV cache of the layer. None: the layer has no attention.
            plan: The result of `ops.plan_attention` for the step. None: the layer has no attention.

        Returns:
            x and residual for the next layer, (T, hidden) each. Their sum is the output of this layer. If the residual
            is None, x is the output.
        """
        if self._attention is None:
            x, residual = self._before("post_norm", x, residual)
            return self._feed(x, inputs), residual
        assert cache is not None, "a layer with attention reads a cache"
        assert plan is not None, "a layer with attention reads a cache"
        queries, normed, residual = self.begin(x, residual, inputs, cache)
        attended = self._attention.attend(queries, inputs, cache, plan)
        del queries  # frees memory before the widest tensors of the layer are allocated
        return self.end(attended, normed, residual, inputs)

    @property
    def attends(self) -> bool:
        """Return True if the layer has attention, so that `begin` and `end` may be called."""
        return self._attention is not None

    @property
    def attention(self) -> AttentionHalf:
        """Return the attention half of the layer, which must have one (see `attends`)."""
        assert self._attention is not None, "a layer without attention is called"
        return self._attention

    def begin(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, cache: LayerCache
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the part of the layer before attention for a step's T tokens, and write their K and V to the cache.

        Args:
            x: (T, hidden).
            residual: (T, hidden), which is added to x. None: x is the whole input of the layer.
            inputs: Positions and cache slots of the step's tokens.
            cache: The KV cache of the layer.

        Returns:
            (queries, normed input, x + residual). The queries are (T, heads, dim), the others (T, hidden). The normed
            input is None if `end` does not need it.
        """
        normed, residual = self._before("input_norm", x, residual)
        queries = self.attention.queries(normed, inputs, cache)
        return queries, normed if self._spec.parallel and "post_norm" not in self._norms else None, residual

    def end(
        self, attended: Tensor, normed: Tensor | None, residual: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the part of the layer after attention.

        Args:
            attended: The result of attention, (T, heads, dim).
            normed: The second result of `begin`.
            residual: The third result of `begin`.
            inputs: The inputs of the step.

        Returns:
            x and residual for the next layer, (T, hidden) each. Their sum is the output of this layer. If the residual
            is None, x is the output.
        """
        if self._spec.norms_sums:
            return self._end_of_sums(self.attention.result(attended, inputs), residual, inputs), None
        attended = self._after("attention_norm", self.attention.result(attended, inputs))
        if self._spec.parallel:
            x = self._before("post_norm", residual, None)[0] if normed is None else normed
            return attended + self._feed(x, inputs), residual
        x, residual = self._before("post_norm", attended, residual)
        return self._feed(x, inputs), residual

    def _end_of_sums(self, attended: Tensor, residual: Tensor, inputs: AttentionInputs) -> Tensor:
        x, _ = self._before("attention_norm", attended, residual)
        fed = feed_forward(self._ops, self._spec, self._parts, x, inputs)
        return self._before("feed_forward_norm", fed, x)[0]

    def _feed(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        x = feed_forward(self._ops, self._spec, self._parts, x, inputs)
        return self._after("feed_forward_norm", x)

    def _before(self, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if name in self._norms:
            return self._ops.norm(self._norms[name], self._parts.norms, name, x, residual)
        total = x if residual is None else x + residual
        return total, total

    def _after(self, name: str, x: Tensor) -> Tensor:
        if name in self._norms:
            x, _ = self._ops.norm(self._norms[name], self._parts.norms, name, x)
        return x if self._spec.residual_multiplier == 1 else x * self._spec.residual_multiplier


def build_layer(ops: Ops, spec: LayerSpec, parts: LayerParts) -> DecoderLayer:
    """Build a layer from its packed weights: a fused layer if `ops` offers one, or else a `Block`.

    Args:
        ops: The operators.
        spec: The layer.
        parts: The packed weights of the layer, with its rotary table.
    """
    return ops.fuse(spec, parts) or Block(ops, spec, parts)


def pack_layer(
    ops: Ops,
    spec: LayerSpec,
    weights: LayerWeights,
    rope: RopeTable | None = None,
    adapters: int = 0,
    room: AdapterRoom | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> LayerParts:
    """Pack the weights of a layer into the form that its operators read.

    Args:
        ops: The operators.
        spec: The layer.
        weights: Its weights. They may include A and B of LoRA adapters.
        rope: The rotary table. None: the layer has no attention, or the table is added later.
        adapters: The number of adapters of the job.
        room: How many adapters the device holds at a time. None: all of them.
        ranks: The ranks that compute the layer together.
    """
    linears = {
        linear.name: _pack(ops, linear, weights)
        for linear in spec.linears
        if not (linear.experts or linear.heads)
    }
    if ranks.tensor.size > 1:
        linears |= {
            name: SummedLinear(linear, ranks.tensor) for name, linear in linears.items() if name in SUMMED
        }
    norms = [parameter for name, norm in spec.norms.items() for parameter in norm_parameters(name, norm)]
    return LayerParts(
        linears,
        {name: weights[name] for name in norms},
        rope,
        pack_experts(ops, spec, weights, ranks),
        {name: weights[name] for name in spec.vectors},
        pack_latent_heads(ops, spec, weights),
        adapters=dict(_adapters(ops, spec, weights, adapters, room)),
    )


def _adapters(
    ops: Ops, spec: LayerSpec, weights: LayerWeights, count: int, room: AdapterRoom | None
) -> Iterator[tuple[str, Adapters]]:
    for linear in spec.linears:
        found = [
            None if a not in weights else Factors(weights[a], weights[b])
            for a, b in (
                (f"{linear.name}{end}{number}" for end in (FACTOR_A, FACTOR_B)) for number in range(count)
            )
        ]
        if any(factors is not None for factors in found):
            yield linear.name, ops.pack_adapters(found, room)


def _pack(ops: Ops, linear: LinearSpec, weights: LayerWeights) -> Linear:
    weight, bias = _weight(ops, linear, weights), weights.get(linear.name + BIAS)
    if linear.exact:
        return ops.pack_exact(weights[linear.name], bias)
    if linear.activation is None:
        return ops.pack_linear(weight, bias)
    pack = ops.pack_gated if linear.gated else ops.pack_activated
    return pack(weight, bias, linear.activation)


def _weight(ops: Ops, linear: LinearSpec, weights: LayerWeights) -> Weight:
    weight, scales = weights[linear.name], weights.get(linear.name + SCALES)
    if scales is None:
        if linear.form is not None and not linear.form.coded:
            return SparseWeight(weight)
        return ops.convert_weight(weight, linear.form)
    group = 0 if linear.form is None else linear.form.group
    lines, zeros = (weights.get(linear.name + end) for end in (LINES, ZEROS))
    return CodedWeight(weight, scales, lines, group, zeros)
