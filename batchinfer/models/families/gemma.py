"""Gemma 1, 2 and 3 (Gemma Team, 2024 and 2025), text only.

Weights of norms are differences from 1, and embeddings are scaled with the square root of their size. Gemma 2 and 3
have windows and a norm after each half of a layer. Gemma 2 caps scores and logits. Gemma 3 norms heads, and has one
rotation per kind of layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchinfer.models.families.family import (
    FULL,
    LLAMA_MODULES,
    LOCAL,
    ConfigFiles,
    Family,
    LayerKind,
    Modules,
    RotationOf,
    activation,
    attention,
    full_rotation,
    hidden_size,
    kinds_of_layers,
    layer_count,
    max_positions,
    model,
    no_rotation,
    rms_eps,
    sliding_window,
)
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import RopeConfig, parse_rope
from batchinfer.models.spec.spec import (
    AttentionSpec,
    EncoderSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)

ABSENT_EOS = (1,)
GELU = "gelu_pytorch_tanh"
PATTERN = {"gemma2": 2, "gemma3_text": 6}
THETA: dict[LayerKind, tuple[str, float]] = {
    FULL: ("rope_theta", 1_000_000.0),
    LOCAL: ("rope_local_base_freq", 10_000.0),
}
MODULES: Modules = {
    **LLAMA_MODULES,
    "attention_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "feed_forward_norm": "post_feedforward_layernorm",
}


def parse_gemma(files: ConfigFiles) -> ModelSpec:
    """Convert a GemmaConfig to the model's spec. Error messages are appended to `files.mistakes`.

    Gemma was trained with the tanh approximation of GELU, so the activation "gelu" is read as this approximation.
    """
    fields = files.config
    bias, named = fields.boolean("attention_bias", False), fields.raw.get("hidden_act") == "gelu"
    attended = attention(fields, absent_kv_heads=16, absent_head_dim=256, qkv_bias=bias, o_bias=bias)
    fed = FeedForwardSpec(
        fields.integer("intermediate_size"),
        "gelu_tanh" if named else activation(fields, absent=GELU),
    )
    return _model("gemma", files, (llama_layer(fields, attended, fed, _norm(fields)),) * layer_count(fields))


def parse_gemma2(files: ConfigFiles) -> ModelSpec:
    """Convert a Gemma2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    attended = replace(
        _attention(fields, None, full_rotation), soft_cap=_cap(fields, "attn_logit_softcapping", 50.0)
    )
    layers = tuple(_layer(fields, attended, kind) for kind in _kinds(fields, "gemma2"))
    return _model("gemma2", files, layers, logit_cap=_cap(fields, "final_logit_softcapping", 30.0))


def parse_gemma3(files: ConfigFiles) -> ModelSpec:
    """Convert a Gemma3TextConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    attended = _attention(fields, _norm(fields), no_rotation)
    turned = {
        kind: replace(attended, rotation=Rotation(_rope(fields, kind), attended.head_dim)) for kind in THETA
    }
    layers = tuple(_layer(fields, turned[kind], kind) for kind in _kinds(fields, "gemma3_text"))
    made = _model("gemma3_text", files, layers, logit_cap=_cap(fields, "final_logit_softcapping"))
    if not _is_encoder(fields):
        return made
    return replace(made, layers=tuple(map(_on_both_sides, layers)), tied=True, encoder=EncoderSpec())


def _is_encoder(fields: Fields) -> bool:
    # Such as EmbeddingGemma
    return fields.boolean("use_bidirectional_attention", False)


def _on_both_sides(layer: LayerSpec) -> LayerSpec:
    attended = layer.attention
    assert isinstance(attended, AttentionSpec), "a Gemma's"
    window = None if attended.window is None else attended.window // 2 + 1
    return replace(layer, attention=replace(attended, window=window))


def _attention(fields: Fields, qk_norm: NormSpec | None, rotation: RotationOf) -> AttentionSpec:
    bias = fields.boolean("attention_bias", False)
    attended = attention(
        fields,
        absent_kv_heads=4,
        absent_head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        rotation=rotation,
    )
    return replace(attended, scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


def _kinds(fields: Fields, family: str) -> list[LayerKind]:
    return kinds_of_layers(fields, layer_count(fields), PATTERN[family])


def _layer(fields: Fields, attended: AttentionSpec, kind: LayerKind) -> LayerSpec:
    norm = _norm(fields)
    window = sliding_window(fields) if kind == LOCAL else None
    fed = FeedForwardSpec(fields.integer("intermediate_size"), activation(fields, "hidden_activation", GELU))
    return LayerSpec(norm.width, norm, replace(attended, window=window), norm, fed, norm, norm)


def _rope(fields: Fields, kind: LayerKind) -> RopeConfig:
    # transformers 5 writes rope_parameters per kind; older files one theta per kind, and rope_scaling for FULL
    key, absent = THETA[kind]
    stated = fields.raw.get("rope_parameters")
    each = stated.get(kind) if isinstance(stated, dict) else None
    raw: dict[str, Any] = {"rope_theta": fields.raw.get(key), "rope_parameters": each}
    if kind == FULL and not each:
        raw["rope_scaling"] = fields.raw.get("rope_scaling")
    return parse_rope(raw, max_positions(fields), fields.mistakes, absent_theta=absent)


def _norm(fields: Fields) -> NormSpec:
    return NormSpec(hidden_size(fields), rms_eps(fields), offset=1.0)


def _cap(fields: Fields, key: str, absent: float | None = None) -> float | None:
    return absent if key not in fields.raw else fields.optional_number(key) or None


def _model(family: str, files: ConfigFiles, layers: tuple[LayerSpec, ...], **special: Any) -> ModelSpec:
    fields = files.config
    if family != "gemma3_text" and _is_encoder(fields):
        fields.mistakes.append(
            f"{fields.name}: use_bidirectional_attention is true, which is no decoder; only false is supported"
        )
    special |= {"embedding_multiplier": hidden_size(fields) ** 0.5, "norm": _norm(fields)}
    return model(family, files, layers, absent_eos=ABSENT_EOS, absent_tied=True, **special)


def gemma_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in Gemma's checkpoints.

    The names are Llama's. Gemma 2 and 3 have more norms.
    """
    return LLAMA_MODULES if layer.attention_norm is None else MODULES


GEMMA = Family("gemma", ("GemmaForCausalLM", "GemmaModel"), parse_gemma)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), parse_gemma2, gemma_modules)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"), parse_gemma3, gemma_modules)
