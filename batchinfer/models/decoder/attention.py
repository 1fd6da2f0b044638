"""The attention half of a decoder layer, between the norm before it and the residual addition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, HeadTurn, LayerCache, RopeTable
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import LatentHeads, LayerParts
from batchinfer.models.spec.spec import AttentionSpec, LatentAttentionSpec, LayerSpec
from batchinfer_kernels.paged_attention import ScoreRules


class AttentionHalf(ABC):
    """The attention of a layer, without the norms and residual addition around it.

    It is computed by `queries`, `attend` and `result`, in this order. CUDA graphs can capture `queries` and `result`,
    but not `attend`, whose kernels depend on the lengths of the sequences.
    """

    @abstractmethod
    def queries(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache) -> Tensor:
        """Return the rotated queries of a step's T tokens, (T, heads, dim), and write their K and V to the cache.

        Args:
            x: (T, hidden), the normed input of the layer.
            inputs: Positions and cache slots of the step's tokens.
            cache: The KV cache of the layer.
        """

    @abstractmethod
    def attend(
        self,
        queries: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the KV cache, and return its result, (T, heads, v_dim).

        Partial blocks that the step must copy are copied first.

        Args:
            queries: (T, heads, dim), from `queries`.
            inputs: The inputs of the step.
            cache: The KV cache of the layer.
            plan: The result of `ops.plan_attention` for the step and the layer's cache group.
            out: (T, heads, v_dim), receives the result. None: the result is a new tensor.
        """

    @abstractmethod
    def result(self, attended: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the output projection of the result of attention, (T, hidden).

        Args:
            attended: (T, heads, v_dim), from `attend`.
            inputs: The inputs of the step, such as the adapter of each token.
        """

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Return (values of the queries, values of the attention result) of a token, summed over all heads."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadsAttention(AttentionHalf):
    """The attention half of a layer with multi-head or grouped-query attention.

    Args:
        ops: The operators.
        spec: The attention of the layer.
        parts: The packed weights of the layer.
        turn: The rotary embedding of q and k, and their norms per head, if they have any.
        rules: Scale, window, soft cap, sinks and bias of attention scores.
    """

    ops: Ops
    spec: AttentionSpec
    parts: LayerParts
    turn: HeadTurn
    rules: ScoreRules

    def queries(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache) -> Tensor:
        """Return the rotated queries of a step's T tokens, (T, heads, dim), and write their K and V to the cache.

        Nothing is written if the layer uses the K and V of an earlier layer.

        Args:
            x: (T, hidden), the normed input of the layer.
            inputs: Positions and cache slots of the step's tokens.
            cache: The KV cache of the layer.
        """
        spec = self.spec
        qkv = self.parts.product(spec.first, x, inputs)
        if spec.q_norm is not None and not spec.norms_heads:
            self._norm_in_place(qkv)
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        return (
            self._rotate_and_store(heads, inputs, cache)
            if spec.kv_layer is None
            else self._rotate(heads, inputs)
        )

    def attend(
        self,
        queries: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the KV cache, and return its result, (T, heads, dim).

        Partial blocks that the step must copy are copied first.

        Args:
            queries: (T, heads, dim), from `queries`.
            inputs: The inputs of the step.
            cache: The KV cache of the layer.
            plan: The result of `ops.plan_attention` for the step and the layer's cache group.
            out: (T, heads, dim), receives the result. None: the result is a new tensor.
        """
        if inputs.parts is not None and self.spec.kv_layer is None:
            self.ops.copy_parts(cache, inputs.parts)
        return self.ops.attention(queries, cache, plan, self.rules, out)

    def result(self, attended: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the output projection of the result of attention, (T, hidden).

        Args:
            attended: (T, heads, dim), from `attend`.
            inputs: The inputs of the step, such as the adapter of each token.
        """
        return self.parts.product("o", attended.flatten(1), inputs)

    @property
    def widths(self) -> tuple[int, int]:
        """Return (values of the queries, values of the attention result) of a token, summed over all heads."""
        return self.spec.q_width, self.spec.q_width

    def _rotate_and_store(self, heads: Tensor, inputs: AttentionInputs, cache: LayerCache) -> Tensor:
        spec = self.spec
        q_end, k_end = spec.q_heads, spec.q_heads + spec.kv_heads
        q, k, v = heads[:, :q_end], heads[:, q_end:k_end], heads[:, k_end:]
        return self.ops.rope_store(q, k, v, self.turn, inputs, cache)

    def _rotate(self, q: Tensor, inputs: AttentionInputs) -> Tensor:
        return self.ops.rope(q, self.turn, inputs)

    def _norm_in_place(self, qkv: Tensor) -> None:
        widths = {"q_norm": self.spec.q_width, "k_norm": self.spec.kv_width}
        start = 0
        for name, norm in self.spec.norms.items():
            assert norm is not None
            part = qkv[:, start : start + widths[name]]
            start += widths[name]
            rows = part.view(len(part), -1, norm.width)
            normed, _ = self.ops.norm(norm, self.parts.norms, name, rows.contiguous())
            rows.copy_(normed)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention(AttentionHalf):
    """The attention half of a layer with multi-head latent attention (MLA), which caches a latent vector per token.

    Args:
        ops: The operators.
        spec: The attention of the layer.
        parts: The packed weights of the layer.
        rope: Cosines and sines of the rotary embedding.
        heads: The weights of each head that map queries to the latent space, and results from it.
    """

    ops: Ops
    spec: LatentAttentionSpec
    parts: LayerParts
    rope: RopeTable
    heads: LatentHeads

    def queries(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache) -> Tensor:
        """Return the queries of a step's T tokens, (T, heads, q_dim), and write the tokens' latents to the cache.

        Args:
            x: (T, hidden), the normed input of the layer.
            inputs: Positions and cache slots of the step's tokens.
            cache: The cache of the layer.
        """
        spec = self.spec
        q = self._queries(x, inputs).view(-1, spec.q_heads, spec.q_dim)
        turned = q[..., spec.plain_dim :]
        kv = self.parts.product("kv_a", x, inputs)
        latent = self._apply_norm("kv_a_norm", kv[:, : spec.rank].contiguous())
        turned.copy_(self.ops.latent_store(turned, latent, kv[:, spec.rank :], self.rope, inputs, cache))
        return q

    def attend(
        self,
        queries: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the cached latents, and return its result, (T, heads, v_dim).

        Partial blocks that the step must copy are copied first.

        Args:
            queries: (T, heads, q_dim), from `queries`.
            inputs: The inputs of the step.
            cache: The cache of the layer.
            plan: The result of `ops.plan_attention` for the step and the layer's cache group.
            out: (T, heads, v_dim), receives the result. None: the result is a new tensor.
        """
        if inputs.parts is not None:
            self.ops.copy_parts(cache, inputs.parts)
        return self.ops.latent_attention(queries, cache, plan, self.heads, self.spec.scale, out)

    def result(self, attended: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the output projection of the result of attention, (T, hidden).

        Args:
            attended: (T, heads, v_dim), from `attend`.
            inputs: The inputs of the step, such as the adapter of each token.
        """
        return self.parts.product("o", attended.flatten(1), inputs)

    @property
    def widths(self) -> tuple[int, int]:
        """Return (values of the queries, values of the attention result) of a token, summed over all heads."""
        spec = self.spec
        return spec.q_heads * spec.q_dim, spec.q_heads * spec.v_dim

    def _queries(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        product = self.parts.product
        if self.spec.q_rank is None:
            return product("q", x, inputs)
        return product("q_b", self._apply_norm("q_a_norm", product("q_a", x, inputs)), inputs)

    def _apply_norm(self, name: str, x: Tensor) -> Tensor:
        norm = self.spec.norms[name]
        assert norm is not None
        return self.ops.norm(norm, self.parts.norms, name, x)[0]


def attention_half(
    ops: Ops, spec: AttentionSpec | LatentAttentionSpec | None, parts: LayerParts
) -> AttentionHalf | None:
    """Build the attention half of a layer from its packed weights; None if the layer has no attention.

    Args:
        ops: The operators.
        spec: The attention of the layer.
        parts: The packed weights of the layer, with its rotary table.
    """
    if spec is None:
        return None
    assert parts.rope is not None, "heads are rotated, if by an angle of 0"
    if isinstance(spec, AttentionSpec):
        sinks = parts.vectors.get("sinks")
        rules = ScoreRules(spec.scale, spec.window, spec.soft_cap, sinks, parts.distances)
        return HeadsAttention(ops, spec, parts, _head_turn(spec, parts, parts.rope), rules)
    assert parts.latent_heads is not None
    return LatentAttention(ops, spec, parts, parts.rope, parts.latent_heads)


def _head_turn(spec: AttentionSpec, parts: LayerParts, rope: RopeTable) -> HeadTurn:
    # Norms of single heads belong to the rotation if its operator computes them
    norm, found = spec.q_norm, parts.norms
    if norm is None or not spec.norms_heads:
        return HeadTurn(rope)
    return HeadTurn(rope, found["q_norm"], found.get("k_norm"), norm.eps, norm.offset)


def pack_latent_heads(ops: Ops, spec: LayerSpec, weights: LayerWeights) -> LatentHeads | None:
    """Pack the weight "kv_b", which computes K and V of each head from latents.

    Returns None if the layer has no latent attention.

    Args:
        ops: The operators.
        spec: The layer.
        weights: The weights of the layer by name.
    """
    attention = spec.attention
    if not isinstance(attention, LatentAttentionSpec):
        return None
    weight = weights["kv_b"].view(attention.q_heads, -1, attention.rank)
    k, v = weight[:, : attention.plain_dim], weight[:, attention.plain_dim :]
    form = next(linear.form for linear in spec.linears if linear.heads)
    return LatentHeads(
        ops.pack_heads(ops.convert_heads(k.transpose(1, 2), form)),
        ops.pack_heads(ops.convert_heads(v, form)),
        attention.rank,
        attention.plain_dim,
    )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBoundary:
    """The values with which the caller of `Decoder.forward_split_at_attention` computes the attention of one layer.

    Args:
        queries: (T, heads, dim), from the attention half's `queries`.
        attention: The attention half of the layer, whose `attend` must be called.
        cache: The KV cache of the layer. It contains K and V of the step's tokens already.
    """

    queries: Tensor
    attention: AttentionHalf
    cache: LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class StaticBuffers:
    """Tensors at fixed addresses, through which captured CUDA graphs exchange values with attention.

    All layers use the same tensors.

    Args:
        tokens: The maximum number of tokens of a step.
        queries: (tokens × w,) for the queries of a layer, with the largest w = heads × dim of all layers.
        attended: (tokens × w,) for the result of a layer's attention, with the largest w = heads × v_dim of all layers.
        hidden: (tokens, hidden) for the hidden states after the last layer.
    """

    tokens: int
    queries: Tensor
    attended: Tensor
    hidden: Tensor
