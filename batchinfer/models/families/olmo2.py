"""OLMo 2 (OLMo et al., 2024): norms after each half of a layer, and norms over all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    ConfigFiles,
    Family,
    Modules,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    model,
    rms_eps,
)
from batchinfer.models.spec.spec import LayerSpec, ModelSpec, NormSpec

ABSENT_EPS = 1e-5
ABSENT_EOS = (50279,)
MODULES: Modules = {
    **LLAMA_MODULES,
    "attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "post_feedforward_layernorm",
}


def parse_olmo2(files: ConfigFiles) -> ModelSpec:
    """Convert an Olmo2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    bias, norm = (
        fields.boolean("attention_bias", False),
        NormSpec(hidden_size(fields), rms_eps(fields, ABSENT_EPS)),
    )
    heads = attention(fields, qkv_bias=bias, o_bias=bias)
    attended = replace(
        heads, q_norm=replace(norm, width=heads.q_width), k_norm=replace(norm, width=heads.kv_width)
    )
    layer = LayerSpec(norm.width, None, attended, None, gated_feed_forward(fields), norm, norm)
    return model("olmo2", files, (layer,) * layer_count(fields), norm=norm, absent_eos=ABSENT_EOS)


def olmo2_modules(_: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in OLMo 2's checkpoints.

    The names are Llama's, but norms follow each half of a layer.
    """
    return MODULES


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), parse_olmo2, olmo2_modules)
