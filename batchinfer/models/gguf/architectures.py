"""The supported architectures of llama.cpp: tensor names, and metadata that differs from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.gguf.files import GgufModel
from batchinfer.models.files.config_fields import Fields

# (the architecture's metadata, the model, the configuration that all architectures share) → additional configuration
Adds = Callable[[Fields, GgufModel, Mapping[str, Any]], dict[str, Any]]
EXPERT = "{expert}"
_TABLES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{EXPERT}.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
# Number of layers of the 27B models, which scale scores differently. llama.cpp also detects them by this number.
_LARGEST = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp stores the models of a supported family in GGUF files.

    Attributes:
        model_type: `model_type` of config.json.
        of: `architectures` of config.json.
        names: Maps the name of a layer's module in the file to its name in checkpoints of the family. Modules with
            Llama's names are left out.
        pairs: If True, the file stores the two rows of a query or key head that are rotated together next to each
            other.
        norms: The number that llama.cpp adds to the weights of norms when it writes a file.
        eps: The key of the norms' epsilon in the file, and in config.json.
        adds: Returns the keys of config.json that only this family has, with values from the file.
        joined: If True, checkpoints of the family store the matrices of all experts in one tensor.
    """

    model_type: str
    of: str
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    norms: float = 0.0
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    adds: Adds = lambda *_: {}
    joined: bool = False

    def module(self, name: str) -> str | None:
        """Return the name that checkpoints of the family use for a module outside of layers; None if it is unknown.

        Args:
            name: The name in the file, such as "token_embd".
        """
        return "lm_head" if name == "output" else f"model.{_TABLES[name]}" if name in _TABLES else None

    def layer_tensor(self, number: str, name: str, end: str) -> str | None:
        """Return the name that checkpoints of the family use for a tensor of a layer; None if it is unknown.

        If the tensor contains all experts, the name contains EXPERT instead of an expert's number.

        Args:
            number: The layer's number.
            name: The module's name in the file, such as "attn_q".
            end: "weight" or "bias".
        """
        whole = self.names.get(f"{name}.{end}")
        module = self.names.get(name) or _LAYER.get(name)
        found = whole or (None if module is None else f"{module}.{end}")
        return None if found is None else f"model.layers.{number}.{found}"


def architecture_of(model: GgufModel) -> Architecture | None:
    """Return how a GGUF file's model is stored, by its `general.architecture`; None if it is not supported.

    A Llama with experts is a Mixtral.
    """
    name = model.metadata.get("general.architecture")
    if name == "llama" and model.metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES.get(name) if isinstance(name, str) else None


def _biases(_: Fields, model: GgufModel, __: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }


def _mixtral(fields: Fields, _: GgufModel, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_local_experts": fields.integer("expert_count"), **_chosen(fields)}


def _chosen(fields: Fields) -> dict[str, Any]:
    return {"num_experts_per_tok": fields.integer("expert_used_count")}


def _experts(fields: Fields, model: GgufModel, _: Mapping[str, Any]) -> dict[str, Any]:
    # Files from before 2024-06 do not state the size of an expert
    found = model.tensors.get("blk.0.ffn_gate_exps.weight")
    size = found.shape[1] if found is not None and len(found.shape) == 3 else None
    shared = fields.raw.get("expert_shared_feed_forward_length") or fields.raw.get("feed_forward_length")
    return {
        "num_experts": fields.integer("expert_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", size),
        "shared_expert_intermediate_size": shared,
        **_chosen(fields),
    }


def _normalised_experts(fields: Fields, model: GgufModel, common: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts(fields, model, common), "norm_topk_prob": True}


def _gemma2(fields: Fields, model: GgufModel, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scalar(model, common),
    }


def _gemma3(fields: Fields, model: GgufModel, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _scalar(model, common),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
    }


def _scalar(model: GgufModel, common: Mapping[str, Any]) -> int:
    # Scores are divided by the square root of the head size, except in the largest models
    if common["num_hidden_layers"] == _LARGEST[model.metadata["general.architecture"]]:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def _phi3(fields: Fields, _: GgufModel, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": fields.optional_integer("attention.sliding_window", low=0) or None}


def _granite(fields: Fields, model: GgufModel, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_biases(fields, model, common),
        "attention_multiplier": fields.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _cohere(fields: Fields, model: GgufModel, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": fields.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


def _cohere2(fields: Fields, _: GgufModel, __: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window")
    return {
        "logit_scale": fields.number("logit_scale"),
        "sliding_window": window,
        "sliding_window_pattern": 4,
    }


def _gpt_oss(fields: Fields, model: GgufModel, common: Mapping[str, Any]) -> dict[str, Any]:
    # Files do not state that the YaRN ramp of gpt-oss is not rounded to whole dimensions
    inner, scaling = (
        fields.integer("expert_feed_forward_length", common["intermediate_size"]),
        common["rope_scaling"],
    )
    return {
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
        "num_local_experts": fields.integer("expert_count"),
        "intermediate_size": inner,
        "sliding_window": fields.integer("attention.sliding_window", 128),
        **_chosen(fields),
    }


_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
_GEMMA_NORMS = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _MIXTRAL_EXPERTS, pairs=True, adds=_mixtral)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", pairs=True, adds=_biases),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _QWEN_EXPERTS, adds=_experts),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_EXPERTS, adds=_normalised_experts),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norms=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA_NORMS, norms=1.0, adds=_gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA_NORMS, norms=1.0, adds=_gemma3),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        adds=_phi3,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", pairs=True, adds=_granite),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _NORMS_AFTER),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _GPT_OSS, adds=_gpt_oss, joined=True),
    "command-r": Architecture("cohere", "CohereForCausalLM", eps=_LAYER_NORM, adds=_cohere),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", eps=_LAYER_NORM, adds=_cohere2),
}
