"""gpt-oss (OpenAI, 2025): attention sinks, a window in every other layer, and experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    LOCAL,
    ConfigFiles,
    Family,
    Modules,
    Part,
    attention,
    hidden_size,
    kinds_of_layers,
    layer_count,
    max_positions,
    model,
    rms_eps,
    routing,
    sliding_window,
)
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields
from batchinfer.models.spec.rope_config import parse_rope
from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec, Rotation
from batchinfer_kernels.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT

ABSENT_EPS, ABSENT_THETA, PATTERN = 1e-5, 150_000.0, 2
ABSENT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_gpt_oss(files: ConfigFiles) -> ModelSpec:
    """Convert a GptOssConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    bias = fields.boolean("attention_bias", True)
    attended = attention(
        fields, absent_kv_heads=8, absent_head_dim=64, qkv_bias=bias, o_bias=bias, rotation=_rotation
    )
    attended = replace(attended, sinks=True)
    rule = replace(
        routing(fields, "num_local_experts", 128, 4, normalised=False), scoring="softmax_of_chosen"
    )
    _check_activation(fields)
    inner = fields.integer("intermediate_size")
    experts = ExpertsSpec(rule, inner, "clamped_swiglu", biased=True, router_biased=True)
    norm = NormSpec(hidden_size(fields), rms_eps(fields, ABSENT_EPS))
    windows = [
        sliding_window(fields, 128) if kind == LOCAL else None
        for kind in kinds_of_layers(fields, layer_count(fields), PATTERN)
    ]
    layers = tuple(llama_layer(fields, replace(attended, window=w), experts, norm) for w in windows)
    return model("gpt_oss", files, layers, norm=norm)


def _rotation(fields: Fields, head_dim: int) -> Rotation:
    raw = fields.raw
    if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raw = {**raw, "rope_parameters": ABSENT_ROPE}
    rope = parse_rope(raw, max_positions(fields), fields.mistakes, absent_theta=ABSENT_THETA)
    return Rotation(rope, head_dim)


def _check_activation(fields: Fields) -> None:
    for key, known in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if fields.number(key, known) != known:
            fields.mistakes.append(f"{fields.name}: {key} is {fields.raw[key]}; only {known} is supported")


def gpt_oss_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in gpt-oss's checkpoints.

    The weights of all experts are in one tensor per matrix product. They are transposed, and the outputs of gate and up
    alternate.
    """
    fed = layer.feed_forward
    if not isinstance(fed, ExpertsSpec):
        return LLAMA_MODULES
    into = Part("mlp.experts.gate_up_proj", 0, 1, 2, transposed=True, weight="", bias="_bias")
    back = replace(into, module="mlp.experts.down_proj", stop=layer.hidden, every=None)
    parts: dict[str, str | Part] = {}
    for expert in range(fed.routing.experts):
        parts[f"expert.{expert}.gate"] = replace(into, index=expert)
        parts[f"expert.{expert}.up"] = replace(into, start=1, stop=2, index=expert)
        parts[f"expert.{expert}.down"] = replace(back, index=expert)
    sinks = Part("self_attn.sinks", 0, layer.vectors["sinks"], weight="")
    return {**LLAMA_MODULES, "router": "mlp.router", "sinks": sinks, **parts}


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM", "GptOssModel"), parse_gpt_oss, gpt_oss_modules)
