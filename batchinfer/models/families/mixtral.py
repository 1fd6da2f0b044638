"""Mixtral (Jiang et al., 2024): a Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.families.family import (
    LLAMA_MODULES,
    ConfigFiles,
    Family,
    Modules,
    activation,
    attention,
    expert_modules,
    hidden_size,
    layer_count,
    model,
    rms_eps,
    routing,
)
from batchinfer.models.families.llama import ABSENT_EOS, llama_layer
from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec

ABSENT_EPS = 1e-5


def parse_mixtral(files: ConfigFiles) -> ModelSpec:
    """Convert a MixtralConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    fields = files.config
    attended = replace(attention(fields, absent_kv_heads=8), window=fields.optional_integer("sliding_window"))
    rule = routing(fields, "num_local_experts", 8, 2, normalised=True)
    experts = ExpertsSpec(rule, fields.integer("intermediate_size"), activation(fields))
    norm = NormSpec(hidden_size(fields), rms_eps(fields, ABSENT_EPS))
    layer = llama_layer(fields, attended, experts, norm)
    return model("mixtral", files, (layer,) * layer_count(fields), norm=norm, absent_eos=ABSENT_EOS)


def mixtral_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in Mixtral's checkpoints."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = expert_modules(layer, "block_sparse_moe.experts", names)
    return {**LLAMA_MODULES, "router": "block_sparse_moe.gate", **experts}


MIXTRAL = Family("mixtral", ("MixtralForCausalLM", "MixtralModel"), parse_mixtral, mixtral_modules)
