"""Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024), and Mistral (Jiang et al., 2023).

Mistral is a Llama with one sliding window.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    layer_kinds,
    model,
    rms_eps,
)
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

ABSENT_EOS = (2,)


def llama_layer(
    fields: Fields,
    attended: AttentionSpec,
    feed_forward: FeedForwardSpec | ExpertsSpec,
    norm: NormSpec | None = None,
) -> LayerSpec:
    """Return the spec of a layer as in Llama: a norm precedes attention, and a norm precedes the feed-forward half.

    Args:
        fields: The fields of config.json.
        attended: The attention.
        feed_forward: The feed-forward half.
        norm: The spec of each of these norms. None: an RMSNorm.
    """
    norm = norm or NormSpec(hidden_size(fields), rms_eps(fields))
    return LayerSpec(norm.width, norm, attended, norm, feed_forward)


def parse_llama(files: ConfigFiles) -> ModelSpec:
    """Convert a LlamaConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    bias = fields.boolean("attention_bias", False)
    attended = attention(fields, qkv_bias=bias, o_bias=bias)
    feed_forward = gated_feed_forward(fields, fields.boolean("mlp_bias", False))
    layers = (llama_layer(fields, attended, feed_forward),) * layer_count(fields)
    return model("llama", files, layers, absent_eos=ABSENT_EOS)


def parse_mistral(files: ConfigFiles) -> ModelSpec:
    """Convert a MistralConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    layers = layer_count(fields)
    attended = replace(attention(fields, absent_kv_heads=8), window=_window(fields, layers))
    layer = llama_layer(fields, attended, gated_feed_forward(fields))
    return model("mistral", files, (layer,) * layers, absent_eos=ABSENT_EOS)


def _window(fields: Fields, layers: int) -> int | None:
    absent = 4096 if "sliding_window" not in fields.raw else None
    window = fields.optional_integer("sliding_window") or absent
    kinds = layer_kinds(fields, layers)
    if window is not None and kinds and "full_attention" in kinds:
        fields.mistakes.append(f"{fields.name}: a Mistral with layer_types is not supported; one window is")
    return window


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), parse_llama)
MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), parse_mistral)
