"""StableLM 2 (Bellagente et al., 2024): LayerNorm, a part of each head rotated, and in some models both halves of a
layer side by side."""

from __future__ import annotations

from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    model,
    parts_of_heads,
)
from batchinfer.models.spec import LayerSpec, ModelSpec, NormSpec

ABSENT_ROTARY_PART = 0.25
ABSENT_EOS = (0,)


def parse_stablelm(files: ConfigFiles) -> ModelSpec:
    """StableLmConfig."""
    fields = files.config
    if fields.boolean("qk_layernorm", False):
        fields.mistakes.append(f"{fields.name}: qk_layernorm is not supported")
    biased, parallel = fields.boolean("use_qkv_bias", False), fields.boolean("use_parallel_residual", False)
    attended = attention(
        fields, absent_kv_heads=32, qkv_bias=biased, rotation=parts_of_heads(ABSENT_ROTARY_PART)
    )
    norm = NormSpec(hidden_size(fields), fields.number("layer_norm_eps", 1e-5), "layer", biased=True)
    layer = LayerSpec(
        norm.width, norm, attended, None if parallel else norm, gated_feed_forward(fields), parallel=parallel
    )
    return model("stablelm", files, (layer,) * layer_count(fields), norm=norm, absent_eos=ABSENT_EOS)


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLmModel"), parse_stablelm)
