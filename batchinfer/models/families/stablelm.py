"""StableLM 2 (Bellagente et al., 2024): LayerNorm, and a rotation of a part of each head.

Some models have parallel halves of a layer, and a LayerNorm with separate weights for each head.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    ConfigFiles,
    Family,
    Modules,
    Rows,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    model,
    partial_rotation,
)
from batchinfer.models.spec.spec import LayerSpec, ModelSpec, NormSpec

ABSENT_ROTARY_PART = 0.25
ABSENT_EOS = (0,)


def parse_stablelm(files: ConfigFiles) -> ModelSpec:
    """Convert a StableLmConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    biased, parallel = fields.boolean("use_qkv_bias", False), fields.boolean("use_parallel_residual", False)
    attended = attention(
        fields, absent_kv_heads=32, qkv_bias=biased, rotation=partial_rotation(ABSENT_ROTARY_PART)
    )
    if fields.boolean("qk_layernorm", False):
        each = NormSpec(attended.head_dim, fields.number("layer_norm_eps", 1e-5), "layer")
        q_norm, k_norm = replace(each, heads=attended.q_heads), replace(each, heads=attended.kv_heads)
        attended = replace(attended, q_norm=q_norm, k_norm=k_norm)
    norm = NormSpec(hidden_size(fields), fields.number("layer_norm_eps", 1e-5), "layer", biased=True)
    layer = LayerSpec(
        norm.width, norm, attended, None if parallel else norm, gated_feed_forward(fields), parallel=parallel
    )
    return model("stablelm", files, (layer,) * layer_count(fields), norm=norm, absent_eos=ABSENT_EOS)


def stablelm_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in StableLM's checkpoints.

    The names are Llama's. The norms of q and k have a module per head.
    """
    norms = {name: norm for name, norm in layer.norms.items() if norm.heads}
    rows = {
        name: Rows(tuple(f"self_attn.{name[0]}_layernorm.norms.{head}" for head in range(norm.heads or 0)))
        for name, norm in norms.items()
    }
    return {**LLAMA_MODULES, **rows}


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLmModel"), parse_stablelm, stablelm_modules)
