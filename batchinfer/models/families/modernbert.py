"""ModernBERT (Warner et al., 2024): an encoder with decoder-like layers, two thirds of them with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchinfer.models.families.classifier import modernbert_classifier
from batchinfer.models.families.family import (
    FULL,
    LOCAL,
    ClassifierNames,
    ConfigFiles,
    Family,
    LayerKind,
    Modules,
    Part,
    TableNames,
    activation,
    attention,
    hidden_size,
    layer_count,
    layer_kinds,
    max_positions,
    model,
    no_rotation,
)
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import RopeConfig, parse_rope
from batchinfer.models.spec.spec import (
    EncoderSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)

ABSENT_EOS = (50282,)
THETA: dict[LayerKind, tuple[str, float]] = {
    FULL: ("global_rope_theta", 160_000.0),
    LOCAL: ("local_rope_theta", 10_000.0),
}


def parse_modernbert(files: ConfigFiles) -> ModelSpec:
    """Convert a ModernBertConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    hidden, bias = hidden_size(fields), fields.boolean("attention_bias", False)
    norm = NormSpec(
        hidden, fields.number("norm_eps", 1e-5), "layer", biased=fields.boolean("norm_bias", False)
    )
    attended = attention(fields, qkv_bias=bias, o_bias=bias, rotation=no_rotation)
    fed = FeedForwardSpec(
        fields.integer("intermediate_size"),
        activation(fields, "hidden_activation", "gelu"),
        biased=fields.boolean("mlp_bias", False),
    )
    # local_attention counts keys on both sides, at a distance of at most half of it
    window = fields.integer("local_attention", 128) // 2 + 1
    layers = []
    for index, kind in enumerate(_kinds(fields)):
        rotation = Rotation(_rope(fields, kind), attended.head_dim)
        own = replace(attended, rotation=rotation, window=window if kind == LOCAL else None)
        # The first layer reads embeddings, which are normed already
        layers.append(LayerSpec(hidden, norm if index else None, own, norm, fed))
    made = model("modernbert", files, tuple(layers), norm=norm, absent_eos=ABSENT_EOS)
    encoder = EncoderSpec(embedding_norm=norm, classifier=modernbert_classifier(fields, norm))
    return replace(made, tied=True, encoder=encoder)


def _kinds(fields: Fields) -> list[LayerKind]:
    count, every = layer_count(fields), fields.integer("global_attn_every_n_layers", 3)
    return layer_kinds(fields, count) or [LOCAL if index % every else FULL for index in range(count)]


def _rope(fields: Fields, kind: LayerKind) -> RopeConfig:
    # transformers 5 writes rope_parameters per kind of attention; older files one theta per kind
    key, absent = THETA[kind]
    stated = fields.raw.get("rope_parameters")
    each = stated.get(kind) if isinstance(stated, dict) else None
    raw: dict[str, Any] = {"rope_theta": fields.raw.get(key), "rope_parameters": each}
    return parse_rope(raw, max_positions(fields), fields.mistakes, absent_theta=absent)


def modernbert_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in ModernBERT's checkpoints.

    q, k and v share a module, and so do gate and up.
    """
    inner, width = layer.feed_forward.inner, layer.hidden
    return {
        **{name: Part("attn.Wqkv", i * width, (i + 1) * width) for i, name in enumerate("qkv")},
        "input_norm": "attn_norm",
        "o": "attn.Wo",
        "post_norm": "mlp_norm",
        "gate": Part("mlp.Wi", 0, inner),
        "up": Part("mlp.Wi", inner, 2 * inner),
        "down": "mlp.Wo",
    }


MODERNBERT = Family(
    "modernbert",
    ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    parse_modernbert,
    modernbert_modules,
    TableNames(
        "model.",
        "embeddings.tok_embeddings",
        final_norm="final_norm",
        unread=("head.", "decoder.", "classifier."),
        embedding_norm="embeddings.norm",
        classifier=ClassifierNames("head.dense", "classifier", norm="head.norm"),
    ),
)
