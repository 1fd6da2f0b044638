"""Compares rotary tables with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.decoder.positions import inverse_frequencies, rope_table
from tests.batchinfer.models.raw_config import PATH, raw_config
from tests.checkpoints import ROPES

# Rotations of published models, with values of a head and positions
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
REAL: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-3.1": ({"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **LLAMA_3}, 128, 131_072),
    "qwen2.5": (YARN, 128, 131_072),
    "yarn without a factor": ({**YARN, "factor": None, "original_max_position_embeddings": 4096}, 80, 65_536),
    "yarn, original = maximum": ({"rope_type": "yarn", "rope_theta": 1e5, "factor": 2.0}, 96, 4096),
    "linear": ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, 128, 16_384),
    "default": ({"rope_type": "default", "rope_theta": 1e6}, 128, 32_768),
}
CASES = {**REAL, **{f"tiny {name}": (rope, 12, 512) for name, rope in ROPES.items()}}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_transformers(name: str) -> None:
    rope, head_dim, positions = CASES[name]
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters=dict(rope),
    )
    ours = parse_config(
        raw_config(head_dim=head_dim, max_position_embeddings=positions, rope_parameters=rope), {}, PATH
    )
    if rope["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
        torch.testing.assert_close(
            inverse_frequencies(ours.attention.rotation.rope, head_dim), frequencies, rtol=1e-6, atol=0
        )
        assert ours.attention.rotation.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    at = torch.tensor([0, 1, 2, 63, 64, 65, positions // 2, positions - 1])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), at[None])
    table = rope_table(ours.attention.rotation, positions, "cpu")
    assert table.cos.shape == table.sin.shape == (positions, head_dim // 2)
    for got, want in ((table.cos, cos), (table.sin, sin)):
        # an angle near the last position is some 1e5: one unit in its last place is 0.008
        exact = at < 1000
        torch.testing.assert_close(got[at][exact], want[0, exact, : head_dim // 2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[at], want[0, :, : head_dim // 2], atol=2e-2, rtol=0)
