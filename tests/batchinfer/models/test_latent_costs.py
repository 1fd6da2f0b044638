"""Tests that docs/measurements/gpu.md quotes the model costs of attention over latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.simulation.step_time import shape_of
from batchinfer_kernels.cost import Peaks, StepShape, roofline_seconds, step_total

H100 = Peaks(989e12, 3.35e12)  # NVIDIA's datasheet, bfloat16
LITE = {  # the sizes of DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
}


@pytest.fixture(scope="module")
def lite() -> ModelSpec:
    return parse_config(LITE, {}, Path("config.json"))


@pytest.mark.parametrize("tokens", [512, 2048, 8192, 32_768])
def test_costs_of_a_prompt_match_the_docs(lite: ModelSpec, tokens: int) -> None:
    found = []
    for deterministic in (True, False):  # without and with K and V that are made
        cost = model_cost(lite, 2, "cuda", deterministic)
        step = cost.step(StepShape(tokens, 1, cost.pairs(tokens), cost.seen(tokens)))
        found += [step["attention"].seconds(H100) * 1e3, roofline_seconds(step, H100) * 1e3]
    row = f"| {tokens:,} | {found[0]:.1f}, {found[1]:.1f} | {found[2]:.1f}, {found[3]:.1f} |"
    assert f"{row} {found[1] / found[3]:.2f} × |" in Path("docs/measurements/gpu.md").read_text()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_useful_flops_never_exceed_computed_flops(lite: ModelSpec, device: Any) -> None:
    """Otherwise MFU could exceed 1. The shape of a step is restored from its record."""
    cost = model_cost(lite, 2, device)
    for tokens, context in ((512, 512), (8192, 8192), (32_768, 32_768), (512, 8192), (1, 3000)):
        pairs = cost.pairs(context) - cost.pairs(context - tokens)
        step = StepShape(tokens, 1, pairs, cost.seen(context))
        done = step_total(cost.step(step))
        assert cost.model_flops(step) <= done.flops
        assert shape_of(cost, tokens, 1, cost.model_flops(step), done.bytes).pairs == pairs


def test_steps_that_decode_and_steps_on_a_cpu_cost_the_same_as_ever(lite: ModelSpec) -> None:
    on_cpu, on_gpu = model_cost(lite, 2), model_cost(lite, 2, "cuda")
    decoding = StepShape(64, 64, on_gpu.layers * 64 * 900, on_gpu.layers * 64 * 900)
    assert on_gpu.step(decoding)["attention"] == on_cpu.step(decoding)["attention"]
    reading = StepShape(900, 1, on_gpu.pairs(900), on_gpu.seen(900))
    ways = [cost.step(reading)["attention"].flops for cost in (on_cpu, on_gpu)]
    assert ways[0] * 640 == ways[1] * 2176, "a pair of a head: 2 x (128 + 64 + 128), not 2 x (512 + 64 + 512)"
    longer = StepShape(100, 1, on_gpu.layers * 100 * 900, on_gpu.layers * 1000)
    assert on_gpu.step(longer)["attention"] == on_cpu.step(longer)["attention"], (
        "900 tokens are too many to make"
    )


def test_quantised_heads_are_multiplied_only_with_queries(lite: ModelSpec) -> None:
    spec = lite.quantized("int8")
    attention = [one for one in model_cost(spec, 2, "cuda").operators if one.name == "attention"]
    assert [one.decompressing for one in attention] == [None]
