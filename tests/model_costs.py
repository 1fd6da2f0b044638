"""Costs of a Llama's steps, by its sizes."""

from __future__ import annotations

from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer.models.spec.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)
from batchinfer_kernels.cost import ModelCost


def llama_spec(
    layers: int, hidden: int, intermediate: int, q_heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelSpec:
    """Return the spec of a Llama with an untied head."""
    norm = NormSpec(hidden, 1e-6)
    attention = AttentionSpec(q_heads, kv_heads, head_dim, head_dim**-0.5, Rotation(RopeConfig(), head_dim))
    layer = LayerSpec(hidden, norm, attention, norm, FeedForwardSpec(intermediate, "silu"))
    return ModelSpec("llama", hidden, vocab, (layer,) * layers, norm, False, 4096, (2,), 1, None)


def llama_cost(
    layers: int,
    hidden: int,
    intermediate: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    itemsize: int,
    weight_itemsize: int,
) -> ModelCost:
    """Return the cost of a Llama.

    Args:
        itemsize: bytes per activation.
        weight_itemsize: bytes per weight; 1 for int8.
    """
    spec = llama_spec(layers, hidden, intermediate, q_heads, kv_heads, head_dim, vocab)
    return model_cost(spec.quantized("int8") if weight_itemsize == 1 else spec, itemsize)
