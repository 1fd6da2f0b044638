"""Tests how config.json and generation_config.json are read, and the messages if they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint.config import load_config, parse_config
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import FeedForwardSpec, NormSpec
from tests.batchinfer.models.raw_config import PATH, raw_config

YARN = {"type": "yarn", "factor": 4.0}


def parse(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    return parse_config(raw, generation or {}, PATH)


def test_defaults_of_each_family() -> None:
    llama = parse(raw_config("llama", head_dim=None, num_key_value_heads=...))
    attention, feed_forward = llama.attention, llama.layers[0].feed_forward
    assert (attention.head_dim, attention.kv_heads, llama.tied) == (12, 4, False)
    assert feed_forward == FeedForwardSpec(64, "silu", False)
    assert (attention.qkv_bias, attention.o_bias, attention.q_norm) == (False, False, None)
    assert attention.rotation.rope.theta == 10_000.0
    mistral = parse(raw_config("mistral", num_attention_heads=8, num_key_value_heads=...))
    assert (mistral.attention.kv_heads, mistral.windows) == (8, (4096, 4096))
    qwen2 = parse(raw_config("qwen2", attention_bias=False))
    assert (qwen2.attention.qkv_bias, qwen2.attention.o_bias, qwen2.windows) == (True, False, (None, None))
    qwen3 = parse(raw_config("qwen3")).attention
    assert (qwen3.head_dim, qwen3.k_norm, qwen3.qkv_bias) == (128, NormSpec(128, 1e-5), False)


@pytest.mark.parametrize(
    ("raw", "generation", "wanted"),
    [
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 8, 9]}, (9, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": 7}, {"temperature": 0.3}, (7,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {}, (2,)),
    ],
)
def test_eos_token_ids(raw: dict[str, Any], generation: dict[str, Any], wanted: tuple[int, ...]) -> None:
    assert parse(raw_config(**raw), generation).eos_token_ids == wanted


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_by_layer_number(family: str) -> None:
    raw = raw_config(family, num_hidden_layers=4, use_sliding_window=True, max_window_layers=2)
    assert parse(raw).windows == (None, None, 4096, 4096)
    assert parse({**raw, "sliding_window": 9}).windows == (None, None, 9, 9)
    assert parse({**raw, "sliding_window": None}).windows == (None,) * 4
    assert parse({**raw, "use_sliding_window": False}).windows == (None,) * 4


def test_sizes() -> None:
    spec = parse(raw_config())
    assert (len(spec.layers), spec.hidden, spec.layers[0].feed_forward.inner, spec.vocab) == (2, 48, 64, 260)
    attention = spec.attention
    assert (attention.q_heads, attention.kv_heads, attention.head_dim, attention.group) == (4, 2, 12, 2)
    cost = model_cost(spec.quantized("int8"), itemsize=2)
    assert cost.kv_bytes(1) == 2 * 2 * 2 * 12 * 2
    assert cost.active_parameters == 2 * (48 * (48 + 2 * 24) + 48 * 48 + 3 * 48 * 64)


def test_rope_scaling_has_priority_over_rope_parameters() -> None:
    linear = {"type": "linear", "factor": 2.0}
    rope = parse(raw_config(rope_scaling=linear, rope_parameters={"rope_theta": 5.0})).attention.rotation.rope
    assert (rope.kind, rope.theta) == ("linear", 10_000.0)
    outside = parse(raw_config(rope_scaling=YARN, original_max_position_embeddings=32, rope_theta=77.0))
    rope = outside.attention.rotation.rope
    assert (rope.original_max_positions, rope.theta) == (32, 77.0)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "t5"},
        "model_type 't5' is not supported; llama, mistral, qwen2, qwen3",
    ),
    ({"model_type": ...}, "model_type None is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "['LlamaForCausalLM'] is"),
    ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM' is not supported"),
    (
        {"quantization_config": {"quant_method": "aqlm"}},
        "quant_method 'aqlm' are not supported; float weights and mxfp4, fp8",
    ),
    ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method ['fp8'] are not supported"),
    ({"quantization_config": [1]}, "quantization_config is [1]; wanted an object"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        "weight_block_size is [128]; wanted two numbers above 0",
    ),
    ({"hidden_size": ...}, "hidden_size is missing; wanted an integer from 1"),
    ({"hidden_size": "48"}, "hidden_size is '48'; wanted an integer"),
    ({"hidden_size": True}, "hidden_size is True; wanted an integer"),
    ({"hidden_size": 48.0}, "hidden_size is 48.0; wanted an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; wanted"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; wanted a number"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ({"head_dim": 13}, "head_dim is 13; rotary embedding needs an even one"),
    ({"num_attention_heads": 5, "head_dim": 8}, "num_attention_heads 5 is no multiple of"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; silu,"),
    ({"hidden_act": 3}, "hidden_act is 3; wanted a string"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; wanted true or false"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; wanted a token id or a list"),
    ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
    ({"rope_scaling": "yarn"}, "the rope parameters are 'yarn'; wanted an object"),
    (
        {"rope_scaling": {"type": "proportional", "factor": 2.0}},
        "rope type 'proportional' is not supported; default, linear",
    ),
    ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing; wanted a list of numbers above 0"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1, 2]}},
        "short_factor has 1 numbers",
    ),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing; wanted a number above 0"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; wanted"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope parameters per layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"rope_theta": 1}, "rope_theta is 1; wanted a number above 1"),
    ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor is -1.0; wanted"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor 4 must be greater than low_freq_factor 4",
    ),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; wanted"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
        "a Mistral with layer_types is not supported",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "wanted 2 times one of"),
    ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 2}, "wanted 2 times one of"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window is off"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError) as raised:
        parse(raw_config(**changes))
    assert raised.value.exit_code == 78
    assert message in str(raised.value)
    assert "model.path" in str(raised.value)
    assert str(PATH) in str(raised.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(JobFileError) as raised:
        parse(raw_config(hidden_size=None, vocab_size=-1, hidden_act="relu", rope_scaling=3))
    assert len(raised.value.mistakes) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": ', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "a JSON object is needed"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_malformed_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(JobFileError, match=message):
        load_config(tmp_path)
