"""The attention half of a decoder layer, as its spec describes it: from what its norm gave to what is added."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.norm import apply_norm
from batchinfer.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, NormSpec
from batchinfer.models.weights import LayerWeights
from batchinfer.ops.interface import (
    AttentionInputs,
    AttentionPlan,
    LatentHeads,
    LayerCache,
    LayerParts,
    Ops,
)


class AttentionHalf(ABC):
    """(T, hidden) → (T, hidden); K and V of the step's tokens are written to the cache."""

    @abstractmethod
    def __call__(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """x: what the layer's norm gave."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadsAttention(AttentionHalf):
    """q, k and v by heads."""

    ops: Ops
    spec: AttentionSpec
    parts: LayerParts

    def __call__(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        linears, spec = self.parts.linears, self.spec
        qkv = linears["qkv"](x)
        heads, kv_heads = spec.q_heads, spec.kv_heads
        if spec.q_norm is not None and not spec.norms_heads:
            self._norm_apart(qkv)
        qkv = qkv.view(-1, heads + 2 * kv_heads, spec.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        each = _each_head(spec.q_norm, self.parts.norms) if spec.norms_heads else ()
        q = self.ops.rope_store(q, k, v, self.parts.rope, inputs, cache, *each)
        rules = (spec.scale, spec.window, spec.soft_cap, self.parts.vectors.get("sinks"))
        return linears["o"](self.ops.attention(q, cache, plan, *rules).flatten(1))

    def _norm_apart(self, qkv: Tensor) -> None:
        """Norms q and k in place, before they are rotated."""
        spec = self.spec
        for name, start, width in (("q_norm", 0, spec.q_width), ("k_norm", spec.q_width, spec.kv_width)):
            norm, part = spec.norms[name], qkv[:, start : start + width]
            assert norm is not None
            stretches = part.view(len(part), -1, norm.width)
            normed, _ = apply_norm(self.ops, norm, self.parts.norms, name, stretches.contiguous())
            stretches.copy_(normed)


def _each_head(
    norm: NormSpec | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, float, float]:
    """What `rope_store` takes to norm each head."""
    assert norm is not None
    return parameters["q_norm"], parameters["k_norm"], norm.eps, norm.offset


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention(AttentionHalf):
    """K and V stay latent: what would make them of it is multiplied into the queries and the results instead."""

    ops: Ops
    spec: LatentAttentionSpec
    parts: LayerParts
    heads: LatentHeads

    def __call__(self, x: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        linears, spec = self.parts.linears, self.spec
        q = self._queries(x).view(-1, spec.q_heads, spec.q_dim)
        plain, turned = q[..., : spec.plain_dim], q[..., spec.plain_dim :]
        kv = linears["kv_a"](x)
        latent = self._normed("kv_a_norm", kv[:, : spec.rank].contiguous())
        turned = self.ops.latent_store(turned, latent, kv[:, spec.rank :], self.parts.rope, inputs, cache)
        query = torch.cat((self.heads.k(plain), turned), -1)
        made = self.ops.latent_attention(query, cache, plan, spec.scale, spec.rank)
        return linears["o"](self.heads.v(made).flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        linears = self.parts.linears
        if self.spec.q_rank is None:
            return linears["q"](x)
        return linears["q_b"](self._normed("q_a_norm", linears["q_a"](x)))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = self.spec.norms[name]
        assert norm is not None
        return apply_norm(self.ops, norm, self.parts.norms, name, x)[0]


def attention_half(ops: Ops, spec: LayerSpec, parts: LayerParts) -> AttentionHalf:
    """The one that the spec describes."""
    attention = spec.attention
    if isinstance(attention, AttentionSpec):
        return HeadsAttention(ops, attention, parts)
    assert parts.latent_heads is not None
    return LatentAttention(ops, attention, parts, parts.latent_heads)


def pack_latent_heads(ops: Ops, spec: LayerSpec, weights: LayerWeights) -> LatentHeads | None:
    """What makes K and V of a latent, head by head; None where there is no latent."""
    attention = spec.attention
    if isinstance(attention, AttentionSpec):
        return None
    weight = weights["kv_b"].view(attention.q_heads, -1, attention.rank)
    k, v = weight[:, : attention.plain_dim], weight[:, attention.plain_dim :]
    return LatentHeads(ops.pack_heads(k.transpose(1, 2)), ops.pack_heads(v))
