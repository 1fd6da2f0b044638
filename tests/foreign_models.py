"""Tiny random checkpoints of transformers' model types outside of our families, and reasons why some do not
run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from batchinfer.models.checkpoint.config import known_types
from batchinfer.models.foreign.interface import silence_transformers

VOCAB = 260
EOS = 257
# Set in every configuration that has the name: a whole model takes a few kilobytes
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "ffn_dim": 64,
    "n_inner": 64,
    # experts
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "head_dim": 8,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# Model types that only need the options SMALL
_PLAIN = (
    *("apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "ctrl", "cwm", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_unified_text", "glm", "glm4"),
    *("glm4_moe", "gpt_bigcode", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2"),
    *("ministral3", "nanochat", "nemotron", "olmo", "olmoe", "opt", "persimmon", "phi", "phimoe"),
    *("seed_oss", "smollm3", "solar_open", "starcoder2"),
)
# Model type → options in addition to SMALL. Each gives transformers' own greedy tokens.
RUNS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in _PLAIN},
    "afmoe": ALTERNATING,
    "axk1": LATENT,
    "cohere2_moe": ALTERNATING,
    "exaone4": ALTERNATING,
    "gemma4_text": {
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "ministral": ALTERNATING,
    "modernbert-decoder": {
        "pad_token_id": 258,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "moshi": {"sliding_window": 512},
    "olmo3": ALTERNATING,
    "vaultgemma": ALTERNATING,
    "youtu": LATENT,
}
# Types with different features: one KV head for all, experts and sinks, latent attention, a nested decoder,
# capped scores, layers with other heads, partial rotation
THINNED = (*("gpt_bigcode", "granitemoe_swa", "glm4_moe_lite", "opt", "vaultgemma", "mimo_v2_flash", "phi"),)


def config_of_type(kind: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a small configuration of a model type."""
    made = CONFIG_MAPPING[kind]
    known = {*made.__dataclass_fields__, *made.attribute_map}
    wanted = {**SMALL, **overrides}
    return made(**{name: value for name, value in wanted.items() if name in known})


def make_foreign(folder: Path, kind: str, seed: int = 1) -> Any:
    """Save a random decoder of a model type of RUNS, and return it with transformers' default settings.

    Weights are large enough to make any mistake visible in the answer; norms and biases are random.
    """
    config = config_of_type(kind, RUNS[kind])
    with silence_transformers():
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(drawn * 0.25)
                elif name.endswith("bias"):
                    parameter.copy_(drawn * 0.3)
                else:
                    parameter.add_(drawn * 0.2)
        model.save_pretrained(folder)
    return model


# Configurations that decide for model types that do not run, if the default one is misleading
JUDGED_BY: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
}


def other_types() -> list[str]:
    """Return transformers' decoders that neither batchinfer nor RUNS covers. Some names are aliases (gpt-sw3
    is gpt2)."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*RUNS}
    return sorted(name for name in names if CONFIG_MAPPING[name].model_type not in known_types())


def stated(kind: str) -> dict[str, Any]:
    """Return a config.json of a type outside of RUNS, with transformers' defaults."""
    with silence_transformers():
        config = CONFIG_MAPPING[kind](**JUDGED_BY.get(kind, {}))
        raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw
