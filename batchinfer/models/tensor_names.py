"""The tensors that a checkpoint of a configuration must hold, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.models.config import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
BASE_PREFIX = "model."
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a buffer that old Llama checkpoints saved; it is computed


def prefix_of(names: Iterable[str]) -> str:
    """ "model." when the tensors are named so (a causal model was saved), "" when only the base model was."""
    return BASE_PREFIX if any(name.startswith(BASE_PREFIX) for name in names) else ""


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name within a layer → shape, (out, in) for weights."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (outputs, inputs, biased) in linears.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if biased:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def expected_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor; a tied checkpoint may leave out the head or the embedding."""
    table = (config.vocab, config.hidden)
    shapes: dict[str, tuple[int, ...]] = {prefix + EMBEDDING: table, HEAD: table}
    per_layer = layer_shapes(config)
    for layer in range(config.layers):
        shapes.update({f"{prefix}layers.{layer}.{name}": shape for name, shape in per_layer.items()})
    shapes[prefix + FINAL_NORM] = (config.hidden,)
    return shapes
