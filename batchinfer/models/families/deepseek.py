"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024): latent attention, and experts in groups, a few of them per token."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    PROJECTIONS,
    ConfigFiles,
    Family,
    Modules,
    Part,
    activation,
    expert_modules,
    gated_feed_forward,
    hidden_size,
    layer_count,
    max_positions,
    model,
    rms_eps,
    routing,
)
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.spec.rope_config import parse_rope, yarn_scale
from batchinfer.models.spec.spec import (
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)
from batchinfer_kernels.routing import Routing

MODULES: Modules = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "router": "mlp.gate",
    **{part: f"mlp.{name}" for part, name in PROJECTIONS.items()},
    **{f"shared.{part}": f"mlp.shared_experts.{name}" for part, name in PROJECTIONS.items()},
}
V2_METHODS = ("greedy", "group_limited_greedy")


def parse_deepseek_v2(files: ConfigFiles) -> ModelSpec:
    """Convert a DeepseekV2Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    method = fields.text("topk_method", "greedy")
    if method not in V2_METHODS:
        fields.mistakes.append(
            f"{fields.name}: topk_method {shown(method)} is not supported; {' and '.join(V2_METHODS)} are"
        )
    # transformers reads norm_topk_prob but never normalises
    rule = routing(
        fields, "n_routed_experts", 64, 0, normalised=False, scale=fields.number("routed_scaling_factor", 1.0)
    )
    if method == "group_limited_greedy":
        rule = _with_groups(fields, rule, fields.integer("n_group"), fields.integer("topk_group"))
    dense = gated_feed_forward(fields, fields.boolean("mlp_bias", False))
    sizes = {"moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0}
    return _model("deepseek_v2", files, rule, dense, sizes, eos=(2,), interleaved=True)


def parse_deepseek_v3(files: ConfigFiles) -> ModelSpec:
    """Convert a DeepseekV3Config to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    scale = fields.number("routed_scaling_factor", 2.5)
    normalised = fields.boolean("norm_topk_prob", True)
    rule = routing(fields, "n_routed_experts", 256, 8, normalised=normalised, scale=scale)
    rule = replace(rule, scoring="sigmoid", corrected=True)
    rule = _with_groups(
        fields, rule, fields.integer("n_group", 8), fields.integer("topk_group", 4), top_two=True
    )
    sizes = {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
    interleaved = fields.boolean("rope_interleave", True)
    return _model(
        "deepseek_v3", files, rule, gated_feed_forward(fields), sizes, eos=(1,), interleaved=interleaved
    )


def _with_groups(fields: Fields, rule: Routing, groups: int, chosen: int, top_two: bool = False) -> Routing:
    try:
        return replace(rule, groups=groups, chosen_groups=chosen, group_score="top_two" if top_two else "max")
    except ValueError as error:
        fields.mistakes.append(f"{fields.name}: n_group {groups} and topk_group {chosen} do not fit: {error}")
        return rule


def _model(
    family: str,
    files: ConfigFiles,
    rule: Routing,
    dense: FeedForwardSpec,
    absent: dict[str, int],
    eos: tuple[int, ...],
    interleaved: bool,
) -> ModelSpec:
    # absent: the keys of an expert's intermediate size, the number of shared experts, and the first layer with experts,
    # with their default values
    fields = files.config
    norm, attended = NormSpec(hidden_size(fields), rms_eps(fields)), _attention(fields, interleaved)
    inner, shared, first = (fields.integer(key, value, low=0) for key, value in absent.items())
    kept = replace(dense, inner=inner * shared) if shared else None
    experts = ExpertsSpec(rule, inner, activation(fields), shared=kept)
    halves = [dense if index < first else experts for index in range(layer_count(fields))]
    layers = tuple(LayerSpec(norm.width, norm, attended, norm, half) for half in halves)
    return model(family, files, layers, norm=norm, absent_eos=eos)


def _attention(fields: Fields, interleaved: bool) -> LatentAttentionSpec:
    rope = parse_rope(fields.raw, max_positions(fields), fields.mistakes)
    plain, dim = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    has_rank = "q_lora_rank" in fields.raw
    return LatentAttentionSpec(
        q_heads=fields.integer("num_attention_heads"),
        rank=fields.integer("kv_lora_rank", 512),
        plain_dim=plain,
        v_dim=fields.integer("v_head_dim", 128),
        scale=(plain + dim) ** -0.5 * yarn_scale(fields.raw, rope) ** 2,
        rotation=Rotation(rope, dim, interleaved=interleaved),
        q_rank=fields.optional_integer("q_lora_rank") if has_rank else 1536,
        biased=fields.boolean("attention_bias", False),
    )


def deepseek_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in DeepSeek's checkpoints."""
    experts = expert_modules(layer, "mlp.experts", PROJECTIONS)
    if not isinstance(layer.feed_forward, ExpertsSpec):
        return MODULES
    correction = Part("mlp.gate", 0, layer.feed_forward.routing.experts, weight=".e_score_correction_bias")
    return {**MODULES, **experts, "correction": correction}


DEEPSEEK_V2 = Family(
    "deepseek_v2", ("DeepseekV2ForCausalLM", "DeepseekV2Model"), parse_deepseek_v2, deepseek_modules
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    parse_deepseek_v3,
    deepseek_modules,
    mtp_layers_key="num_nextn_predict_layers",
)
