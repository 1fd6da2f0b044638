"""Command R and R+ (Cohere, 2024), and Command R7B (2024).

LayerNorms without bias, parallel halves of a layer, interleaved pairs in the rotation, and scaled logits. R7B rotates
only in layers with a window.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LOCAL,
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    hidden_size,
    kinds_of_layers,
    layer_count,
    max_positions,
    model,
    sliding_window,
)
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import parse_rope
from batchinfer.models.spec.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, Rotation

ABSENT_EOS, ABSENT_SCALE, PATTERN = (255001,), 0.0625, 4
ABSENT_THETA = {"cohere": 500_000.0, "cohere2": 10_000.0}


def parse_cohere(files: ConfigFiles) -> ModelSpec:
    """Convert a CohereConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    attended = _attention(fields, "cohere")
    if fields.boolean("use_qk_norm", False):
        norm = replace(_norm(fields), width=attended.head_dim)
        attended = replace(
            attended,
            q_norm=replace(norm, heads=attended.q_heads),
            k_norm=replace(norm, heads=attended.kv_heads),
        )
    return _model("cohere", files, (_layer(fields, attended),) * layer_count(fields))


def parse_cohere2(files: ConfigFiles) -> ModelSpec:
    """Convert a Cohere2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    attended = _attention(fields, "cohere2")
    still = replace(attended, rotation=replace(attended.rotation, rope=None))
    attended = replace(attended, window=sliding_window(fields))
    layers = tuple(
        _layer(fields, attended if kind == LOCAL and attended.window else still)
        for kind in kinds_of_layers(fields, layer_count(fields), PATTERN)
    )
    return _model("cohere2", files, layers)


def _attention(fields: Fields, family: str) -> AttentionSpec:
    bias, theta = fields.boolean("attention_bias", False), ABSENT_THETA[family]

    def neighbours(fields: Fields, head_dim: int) -> Rotation:
        rope = parse_rope(fields.raw, max_positions(fields), fields.mistakes, absent_theta=theta)
        return Rotation(rope, head_dim, interleaved=True)

    return attention(fields, qkv_bias=bias, o_bias=bias, rotation=neighbours)


def _layer(fields: Fields, attended: AttentionSpec) -> LayerSpec:
    norm = _norm(fields)
    return LayerSpec(norm.width, norm, attended, None, gated_feed_forward(fields), parallel=True)


def _norm(fields: Fields) -> NormSpec:
    return NormSpec(hidden_size(fields), fields.number("layer_norm_eps", 1e-5), "layer")


def _model(family: str, files: ConfigFiles, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    scale, norm = files.config.number("logit_scale", ABSENT_SCALE), _norm(files.config)
    return model(
        family,
        files,
        layers,
        norm=norm,
        absent_eos=ABSENT_EOS,
        absent_tied=True,
        logit_multiplier=scale,
    )


COHERE = Family("cohere", ("CohereForCausalLM", "CohereModel"), parse_cohere)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), parse_cohere2)
