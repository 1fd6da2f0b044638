"""Phi-3 and Phi-4 (Abdin et al., 2024): a Llama whose checkpoints fuse q, k and v, and gate and up.

A part of each head may be rotated.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    ConfigFiles,
    Family,
    Modules,
    Part,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    max_positions,
    model,
    rms_eps,
)
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import parse_rope, rotary_part
from batchinfer.models.spec.spec import LayerSpec, ModelSpec, NormSpec, Rotation

ABSENT_EPS = 1e-5
ABSENT_EOS = (32000,)
ABSENT_ORIGINAL = 4096


def parse_phi3(files: ConfigFiles) -> ModelSpec:
    """Convert a Phi3Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    window = fields.optional_integer("sliding_window")
    attended = replace(attention(fields, rotation=_rotation), window=window)
    norm = NormSpec(hidden_size(fields), rms_eps(fields, ABSENT_EPS))
    layer = llama_layer(fields, attended, gated_feed_forward(fields), norm)
    return model("phi3", files, (layer,) * layer_count(fields), norm=norm, absent_eos=ABSENT_EOS)


def _rotation(fields: Fields, head_dim: int) -> Rotation:
    # As in transformers, "yarn" means LongRoPE, and the default original length is 4096
    raw = {"original_max_position_embeddings": ABSENT_ORIGINAL, **fields.raw}
    for key in ("rope_scaling", "rope_parameters"):
        stated = raw.get(key)
        if isinstance(stated, dict) and "yarn" in (stated.get("type"), stated.get("rope_type")):
            raw[key] = {**stated, "rope_type": "longrope"}
    rope = parse_rope(raw, max_positions(fields), fields.mistakes, partial=True)
    return Rotation(rope, rotary_part(raw, head_dim, fields.mistakes))


def phi3_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in Phi-3's checkpoints.

    q, k and v share a module, and so do gate and up.
    """
    fused = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    parts = dict(LLAMA_MODULES)
    for linear in layer.linears:
        if linear.name not in fused:
            continue
        start = 0
        for name, outputs in linear.parts:
            parts[name] = Part(fused[linear.name], start, start + outputs)
            start += outputs
    return parts


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), parse_phi3, phi3_modules)
