"""GPT-2 (Radford et al., 2019), GPT-NeoX (Black et al., 2022) and Pythia (Biderman et al., 2023).

GPT-2 has learned positions, and weights that are stored as (inputs, outputs). The others have parallel halves of a
layer, and store q, k and v head by head.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    Modules,
    Part,
    TableNames,
    activation,
    attention,
    hidden_size,
    layer_count,
    max_positions,
    model,
    no_rotation,
)
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import parse_rope, rotary_part
from batchinfer.models.spec.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)

# Llama's names of fields → GPT-2's
GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
GPT2_NAMES = TableNames(
    "transformer.", "wte", "wpe", "h", "ln_f", ignored=(".attn.bias", ".attn.masked_bias")
)
NEOX_NAMES = TableNames(
    "gpt_neox.",
    "embed_in",
    final_norm="final_layer_norm",
    head="embed_out",
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


def parse_gpt2(files: ConfigFiles) -> ModelSpec:
    """Convert a GPT2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    files = replace(files, config=files.config.rename_keys(GPT2_FIELDS))
    fields = files.config
    if fields.boolean("add_cross_attention", False):
        fields.mistakes.append(f"{fields.name}: add_cross_attention is true; only false is supported")
    norm = _norm(fields, "layer_norm_epsilon")
    inner = fields.optional_integer("n_inner") or 4 * norm.width
    fed = FeedForwardSpec(
        inner, activation(fields, "activation_function", "gelu_new"), biased=True, gated=False
    )
    attended = attention(fields, qkv_bias=True, o_bias=True, rotation=no_rotation)
    scale = attended.scale if fields.boolean("scale_attn_weights", True) else 1.0
    by_layer = fields.boolean("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (index + 1 if by_layer else 1) for index in range(layer_count(fields))]
    layers = [LayerSpec(norm.width, norm, replace(attended, scale=each), norm, fed) for each in scales]
    return model(
        "gpt2",
        files,
        tuple(layers),
        norm=norm,
        absent_eos=(50256,),
        absent_tied=True,
        learned_positions=True,
    )


def parse_gpt_neox(files: ConfigFiles) -> ModelSpec:
    """Convert a GPTNeoXConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    bias, norm = fields.boolean("attention_bias", True), _norm(fields, "layer_norm_eps")
    attended = attention(fields, qkv_bias=bias, o_bias=bias, rotation=_neox_rotation)
    fed = FeedForwardSpec(
        fields.integer("intermediate_size"), activation(fields, absent="gelu"), biased=True, gated=False
    )
    parallel = fields.boolean("use_parallel_residual", True)
    layer = LayerSpec(norm.width, norm, attended, norm, fed, parallel=parallel)
    return model("gpt_neox", files, (layer,) * layer_count(fields), norm=norm, absent_eos=(2,))


def _neox_rotation(fields: Fields, head_dim: int) -> Rotation:
    raw = {
        **fields.raw,
        "rope_theta": fields.raw.get("rotary_emb_base"),
        "partial_rotary_factor": fields.raw.get("rotary_pct"),
    }
    rope = parse_rope(raw, max_positions(fields), fields.mistakes, partial=True)
    return Rotation(rope, rotary_part(raw, head_dim, fields.mistakes, absent=0.25))


def _norm(fields: Fields, key: str) -> NormSpec:
    return NormSpec(hidden_size(fields), fields.number(key, 1e-5), "layer", biased=True)


def gpt2_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in GPT-2's checkpoints.

    q, k and v share a module, and weights are transposed.
    """
    assert isinstance(layer.attention, AttentionSpec)
    width = layer.attention.q_width
    parts = {
        name: Part("attn.c_attn", i * width, (i + 1) * width, transposed=True) for i, name in enumerate("qkv")
    }
    return {
        **parts,
        "input_norm": "ln_1",
        "o": Part("attn.c_proj", 0, layer.hidden, transposed=True),
        "post_norm": "ln_2",
        "up": Part("mlp.c_fc", 0, layer.feed_forward.inner, transposed=True),
        "down": Part("mlp.c_proj", 0, layer.hidden, transposed=True),
    }


def gpt_neox_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in GPT-NeoX's checkpoints.

    q, k and v share a module, in which the outputs of q, k and v alternate head by head.
    """
    assert isinstance(layer.attention, AttentionSpec)
    dim = layer.attention.head_dim
    parts = {
        name: Part("attention.query_key_value", i * dim, (i + 1) * dim, every=3 * dim)
        for i, name in enumerate("qkv")
    }
    return {
        **parts,
        "input_norm": "input_layernorm",
        "o": "attention.dense",
        "post_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }


GPT2 = Family("gpt2", ("GPT2LMHeadModel", "GPT2Model"), parse_gpt2, gpt2_modules, GPT2_NAMES)
GPT_NEOX = Family(
    "gpt_neox", ("GPTNeoXForCausalLM", "GPTNeoXModel"), parse_gpt_neox, gpt_neox_modules, NEOX_NAMES
)
