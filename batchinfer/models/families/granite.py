"""Granite 3 (IBM, 2024): a Llama with multipliers."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    layer_count,
    model,
)
from batchinfer.models.families.llama import ABSENT_EOS, llama_layer
from batchinfer.models.spec.spec import ModelSpec


def parse_granite(files: ConfigFiles) -> ModelSpec:
    """Convert a GraniteConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    bias = fields.boolean("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0)
    attended = replace(attention(fields, qkv_bias=bias, o_bias=bias), scale=scale)
    feed_forward = gated_feed_forward(fields, fields.boolean("mlp_bias", False))
    layer = replace(
        llama_layer(fields, attended, feed_forward),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
    )
    return model(
        "granite",
        files,
        (layer,) * layer_count(fields),
        absent_eos=ABSENT_EOS,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=1 / fields.number("logits_scaling", 1.0),
    )


GRANITE = Family("granite", ("GraniteForCausalLM", "GraniteModel"), parse_granite)
