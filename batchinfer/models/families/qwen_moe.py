"""Qwen2-MoE (Yang et al., 2024) and Qwen3-MoE (Yang et al., 2025): Qwen2 and Qwen3 with experts in some layers."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    PROJECTIONS,
    ConfigFiles,
    Family,
    Modules,
    activation,
    attention,
    expert_modules,
    gated_feed_forward,
    layer_count,
    layer_kinds,
    model,
    rms_eps,
    routing,
)
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

MODULES: Modules = {
    **LLAMA_MODULES,
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_expert_gate",
    **{f"shared.{part}": f"mlp.shared_expert.{name}" for part, name in PROJECTIONS.items()},
}


def parse_qwen2_moe(files: ConfigFiles) -> ModelSpec:
    """Convert a Qwen2MoeConfig to the model's spec. Error messages are appended to `files.mistakes`.

    In addition to the chosen experts, all tokens use a gated shared expert.
    """
    fields = files.config
    attended = attention(fields, absent_kv_heads=16, qkv_bias=fields.boolean("qkv_bias", True))
    normalised = fields.boolean("norm_topk_prob", False)
    experts = ExpertsSpec(
        routing(fields, "num_experts", 60, 4, normalised=normalised),
        fields.integer("moe_intermediate_size", 1408),
        activation(fields),
        shared=FeedForwardSpec(fields.integer("shared_expert_intermediate_size", 5632), activation(fields)),
        shared_gated=True,
    )
    return model("qwen2_moe", files, _layers(fields, attended, experts, _alternating_windows(fields)))


def parse_qwen3_moe(files: ConfigFiles) -> ModelSpec:
    """Convert a Qwen3MoeConfig to the model's spec. Error messages are appended to `files.mistakes`.

    transformers 5 saves the number of experts as `num_local_experts`.
    """
    fields = files.config
    bias = fields.boolean("attention_bias", False)
    norm = NormSpec(0, rms_eps(fields))
    attended = attention(fields, absent_kv_heads=4, qkv_bias=bias, o_bias=bias, qk_norm=norm)
    key = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    normalised = fields.boolean("norm_topk_prob", False)
    rule = routing(fields, key, 128, 8, normalised=normalised)
    experts = ExpertsSpec(rule, fields.integer("moe_intermediate_size", 768), activation(fields))
    windows = [_window(fields)] * layer_count(fields)
    return model("qwen3_moe", files, _layers(fields, attended, experts, windows))


def _layers(
    fields: Fields, attended: AttentionSpec, experts: ExpertsSpec, windows: list[int | None]
) -> tuple[LayerSpec, ...]:
    dense, plain = gated_feed_forward(fields), _layers_without_experts(fields)
    every = fields.integer("decoder_sparse_step", 1)
    halves = [dense if i in plain or (i + 1) % every else experts for i in range(len(windows))]
    return tuple(
        llama_layer(fields, replace(attended, window=window), half)
        for window, half in zip(windows, halves, strict=True)
    )


def _layers_without_experts(fields: Fields) -> list[int]:
    found = fields.raw.get("mlp_only_layers")
    if found is None:
        return []
    if not isinstance(found, list) or not all(type(layer) is int for layer in found):
        fields.mistakes.append(f"{fields.name}: mlp_only_layers is {shown(found)}; wanted a list of layers")
        return []
    return found


def _window(fields: Fields) -> int | None:
    if not fields.boolean("use_sliding_window", False):
        return None
    return fields.optional_integer("sliding_window") or (None if "sliding_window" in fields.raw else 4096)


def _alternating_windows(fields: Fields) -> list[int | None]:
    layers, window = layer_count(fields), _window(fields)
    kinds = layer_kinds(fields, layers)
    if kinds is None:
        most = fields.integer("max_window_layers", 28, low=0)
        return [window if i % 2 == 0 and i < most else None for i in range(layers)]
    if window is None and "sliding_attention" in kinds:
        fields.mistakes.append(
            f"{fields.name}: layer_types names sliding_attention, but use_sliding_window is off"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def qwen_moe_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in Qwen-MoE's checkpoints."""
    return {**MODULES, **expert_modules(layer, "mlp.experts", PROJECTIONS)}


QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM", "Qwen2MoeModel"), parse_qwen2_moe, qwen_moe_modules)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM", "Qwen3MoeModel"), parse_qwen3_moe, qwen_moe_modules)
