"""Qwen2 and 2.5 (Yang et al., 2024), and Qwen3 (Yang et al., 2025), which norms each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    layer_count,
    layer_kinds,
    model,
    rms_eps,
)
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec


def parse_qwen2(files: ConfigFiles) -> ModelSpec:
    """Convert a Qwen2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    attended = attention(files.config, absent_kv_heads=32, qkv_bias=True)
    return model("qwen2", files, _layers(files.config, attended))


def parse_qwen3(files: ConfigFiles) -> ModelSpec:
    """Convert a Qwen3Config to the model's spec. Error messages are appended to `files.mistakes`.

    The default head size is 128, regardless of the hidden size.
    """
    bias = files.config.boolean("attention_bias", False)
    attended = attention(
        files.config,
        absent_kv_heads=32,
        absent_head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=NormSpec(0, rms_eps(files.config)),
    )
    return model("qwen3", files, _layers(files.config, attended))


def _layers(fields: Fields, attended: AttentionSpec) -> tuple[LayerSpec, ...]:
    feed_forward = gated_feed_forward(fields)
    return tuple(
        llama_layer(fields, replace(attended, window=window), feed_forward)
        for window in _windows(fields, layer_count(fields))
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    kinds = layer_kinds(fields, layers)
    used = fields.boolean("use_sliding_window", False)
    absent = 4096 if "sliding_window" not in fields.raw else None
    window = (fields.optional_integer("sliding_window") or absent) if used else None
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if i >= first else None for i in range(layers))
    if window is None and "sliding_attention" in kinds:
        fields.mistakes.append(
            f"{fields.name}: layer_types names sliding_attention, but use_sliding_window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), parse_qwen2)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), parse_qwen3)
