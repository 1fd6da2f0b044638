"""Tests every family with random sizes and options against transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batchinfer.models.test_logits import SCALED, check_logits
from tests.checkpoints import FAMILIES, HEADS_FILL_HIDDEN, PARTIAL_ROPES, ROPES, make_checkpoint
from tests.examples import examples

WINDOW = st.sampled_from([None, 1, 9, 24])
EXPERTS: dict[str, st.SearchStrategy[Any]] = {
    "num_experts": st.sampled_from([4, 5, 16, 33]),
    "num_experts_per_tok": st.integers(1, 4),
    "moe_intermediate_size": st.sampled_from([15, 32]),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.integers(1, 2),
    "mlp_only_layers": st.sampled_from([[], [1]]),
}
LATENT_SIZES: dict[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.booleans(),
    "kv_lora_rank": st.sampled_from([2, 12, 34]),
    "q_lora_rank": st.sampled_from([None, 20]),
    "qk_nope_head_dim": st.sampled_from([6, 16]),
    "qk_rope_head_dim": st.sampled_from([2, 8]),
    "v_head_dim": st.sampled_from([5, 16]),
    "first_k_dense_replace": st.integers(0, 2),
    "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
}
BIAS = {"attention_bias": st.booleans()}
BIASES = {**BIAS, "mlp_bias": st.booleans()}
SOME_WINDOWS = {"use_sliding_window": st.booleans(), "sliding_window": st.sampled_from([9, 24])}
QWEN = {**SOME_WINDOWS, "max_window_layers": st.integers(0, 3)}
ALWAYS = {"sliding_window": st.sampled_from([1, 9, 24])}
PATTERN = {**BIAS, **ALWAYS, "sliding_window_pattern": st.integers(1, 3)}
PRE_ATTENTION = {"query_pre_attn_scalar": st.sampled_from([8, 20])}
SHARED = {"n_shared_experts": st.integers(1, 2)}
# Options of a family in addition to the common sizes
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "llama": BIASES,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {
        "sliding_window": WINDOW,
        "num_local_experts": st.sampled_from([2, 3, 8, 17]),
        "num_experts_per_tok": st.integers(1, 2),
    },
    "qwen2": QWEN,
    "qwen3": BIAS,
    "qwen2_moe": {
        **EXPERTS,
        **QWEN,
        "shared_expert_intermediate_size": st.sampled_from([12, 31]),
        "qkv_bias": st.booleans(),
    },
    "qwen3_moe": {**EXPERTS, **BIAS, **SOME_WINDOWS},
    "granite": {
        **BIASES,
        "attention_multiplier": st.sampled_from([0.1, 0.4]),
        "embedding_multiplier": st.sampled_from([0.5, 1.0, 3.0]),
        "residual_multiplier": st.sampled_from([0.3, 1.0]),
        "logits_scaling": st.sampled_from([0.25, 1.0]),
    },
    "olmo2": BIAS,
    "phi3": {"sliding_window": WINDOW},
    "stablelm": {name: st.booleans() for name in ("use_qkv_bias", "use_parallel_residual", "qk_layernorm")},
    "gemma": {**BIAS, "hidden_act": st.sampled_from(["gelu", "silu"])},
    "gemma2": {
        **BIAS,
        **ALWAYS,
        **PRE_ATTENTION,
        "attn_logit_softcapping": st.sampled_from([None, 1.0, 50.0]),
        "final_logit_softcapping": st.sampled_from([None, 3.0, 30.0]),
    },
    "gemma3_text": {**PATTERN, **PRE_ATTENTION, "final_logit_softcapping": st.sampled_from([None, 30.0])},
    "cohere": {**BIAS, "use_qk_norm": st.booleans()},
    "cohere2": PATTERN,
    "gpt2": {
        "scale_attn_weights": st.booleans(),
        "scale_attn_by_inverse_layer_idx": st.booleans(),
        "activation_function": st.sampled_from(["gelu_new", "gelu", "silu"]),
    },
    "gpt_neox": {**BIAS, "use_parallel_residual": st.booleans()},
    "gpt_oss": {
        **BIAS,
        **ALWAYS,
        "num_local_experts": st.integers(2, 6),
        "num_experts_per_tok": st.integers(1, 2),
    },
    "deepseek_v2": {
        **LATENT_SIZES,
        **SHARED,
        "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    },
    "deepseek_v3": {
        **LATENT_SIZES,
        **SHARED,
        "rope_interleave": st.booleans(),
        "norm_topk_prob": st.booleans(),
        "topk_group": st.integers(2, 4),
    },
}
PARTIAL = ("phi3", "stablelm", "gpt_neox")


def test_every_family_is_drawn() -> None:
    assert set(OPTIONS) == set(FAMILIES)


@st.composite
def configurations(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw arguments of `make_checkpoint`."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    ropes = ["default", *(ROPES if family in SCALED else ()), *(PARTIAL_ROPES if family in PARTIAL else ())]
    chosen = {name: draw(values) for name, values in OPTIONS[family].items()}
    chosen |= {
        "rope": draw(st.sampled_from(ropes)),
        "tied": draw(st.booleans()),
        "shards": draw(st.sampled_from([1, 3])),
        "seed": draw(st.integers(0, 2**16)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 24, 80] if family in PARTIAL else [8, 10, 24, 80])),
        "intermediate_size": draw(st.sampled_from([33, 64])),
    }
    if family not in HEADS_FILL_HIDDEN:
        heads = kv_heads * group
        chosen["hidden_size"] = heads * -(
            -draw(st.sampled_from([36, 50])) // heads
        )  # some require a multiple
    elif family == "stablelm" and chosen["rope"] in PARTIAL_ROPES:
        chosen["partial_rotary_factor"] = PARTIAL_ROPES[chosen["rope"]]["partial_rotary_factor"]
    return chosen


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    @settings(max_examples=examples(2, 50), deadline=None)
    @given(configuration=configurations(family))
    def drawn(configuration: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = make_checkpoint(Path(folder), family, **configuration)
            check_logits(Path(folder), model, lengths=(1, 17, 70))

    drawn()
