"""OLMo 2 (OLMo et al., 2024): norms after each half of a layer instead of before, and over all heads of q and k."""

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
from batchinfer.models.spec import LayerSpec, ModelSpec, NormSpec

ABSENT_EPS = 1e-5
ABSENT_EOS = (50279,)
MODULES: Modules = {
    **LLAMA_MODULES,
    "attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "post_feedforward_layernorm",
}


def parse_olmo2(files: ConfigFiles) -> ModelSpec:
    """Olmo2Config."""
    fields = files.config
    hidden, eps, bias = (
        hidden_size(fields),
        rms_eps(fields, ABSENT_EPS),
        fields.boolean("attention_bias", False),
    )
    heads = attention(fields, qkv_bias=bias, o_bias=bias)
    attended = replace(heads, q_norm=NormSpec(heads.q_width, eps), k_norm=NormSpec(heads.kv_width, eps))
    norm = NormSpec(hidden, eps)
    layer = LayerSpec(hidden, None, attended, None, gated_feed_forward(fields), norm, norm)
    spec = model("olmo2", files, (layer,) * layer_count(fields), absent_eos=ABSENT_EOS)
    return replace(spec, final_norm=norm)


def olmo2_modules(_: LayerSpec) -> Modules:
    """Llama's, with other norms."""
    return MODULES


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), parse_olmo2, olmo2_modules)
