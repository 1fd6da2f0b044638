"""Compares logits with transformers for all families and all options of a configuration."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.families.family import ACTIVATIONS, NamePrefixes
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.gated_activation import activation_reference
from tests.batchinfer.models.paged import load_decoder, run_paged
from tests.checkpoints import FAMILIES, LONGROPE, ROPES, cast_parameters, edit_json, make_checkpoint
from tests.examples import everything, first_of

LENGTHS = (1, 2, 17, 63, 100, 300) if everything() else (1, 17, 63, 100)
# (tokens of each prompt a step, block size). Small ones take most of the time: `test_small_chunks` has them always.
CHUNKS = ((None, 16), (64, 8), *(((7, 16),) if everything() else ()))

# Families with the common ways to scale rotary embeddings
SCALED = [family for family in FAMILIES if family not in ("phi3", "gpt2", "gemma3_text")]


def prompts_of(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def check_logits(folder: Path, model: Any, *, lengths: tuple[int, ...] = LENGTHS) -> Checkpoint:
    """Compare logits of whole and chunked prompts in batches with transformers, one prompt at a time."""
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint)
    ops = TorchOps()
    decoder = load_decoder(checkpoint, ops, torch.float32, "cpu", checkpoint.spec.max_positions)
    prompts = prompts_of(checkpoint.spec.vocab, lengths)
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for chunk, block_size in CHUNKS:
        found = run_paged(decoder, ops, prompts, chunk=chunk, block_size=block_size)
        for got, want in zip(found, wanted, strict=True):
            # Rounding grows with the logits. Of gpt_neox with 640 hidden values, their standard deviation is 5. float32
            # then differs from float64 by 2e-3 in transformers and here, and the two differ by 3e-4
            atol = 1e-4 * max(1.0, float(wanted[-1].std()))
            torch.testing.assert_close(got, want, atol=atol, rtol=1e-4)
    assert pickle.loads(pickle.dumps(checkpoint.spec)) == checkpoint.spec, "engines get it"
    assert wanted[-1].std() > 0.3, "logits too flat to tell a right decoder from a wrong one"
    return checkpoint


@pytest.mark.sample(21)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tied_and_sharded(tmp_path: Path, family: str, tied: bool, shards: int) -> None:
    model = make_checkpoint(tmp_path, family, tied=tied, shards=shards)
    checkpoint = check_logits(tmp_path, model)
    assert len(checkpoint.files) >= shards
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    assert (head in checkpoint.tensors) is not tied


@pytest.mark.sample(7)
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_chunks(tmp_path: Path, family: str, chunk: int) -> None:
    model = make_checkpoint(tmp_path, family)
    ops = TorchOps()
    decoder = load_decoder(inspect_checkpoint(tmp_path), ops, torch.float32, "cpu", 512)
    prompts = prompts_of(260, (1, 2, 17, 63))
    for prompt, got in zip(prompts, run_paged(decoder, ops, prompts, chunk=chunk, seed=chunk), strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_two_stored_tables_are_used_as_transformers_does(tmp_path: Path, tied: bool) -> None:
    """config.json ties them, but head and embedding are stored: they are shared only if equal."""
    make_checkpoint(tmp_path, "llama", tied=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=tied)
    model = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    check_logits(tmp_path, model, lengths=(17,))


def test_base_model_without_prefix(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "whole", "qwen3", tied=True)
    model.model.save_pretrained(tmp_path / "base")
    checkpoint = check_logits(tmp_path / "base", model, lengths=(17,))
    assert checkpoint.prefixes == NamePrefixes()
    assert "embed_tokens.weight" in checkpoint.tensors


@pytest.mark.parametrize("family", first_of(sorted(SCALED, key=lambda family: family != "gpt_neox"), 2))
def test_config_as_transformers_4_wrote_it(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path, family, rope="yarn")
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rotary_emb_base" if family == "gpt_neox" else "rope_theta"] = rope.pop("rope_theta")
    if family == "gpt_neox":
        raw["rotary_pct"] = rope.pop("partial_rotary_factor")
    raw["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = check_logits(tmp_path, model, lengths=(100,))
    assert checkpoint.spec.dtype == "float32"


@pytest.mark.parametrize("transformers_4", [False, True])
def test_a_rotation_for_each_kind_of_layer(tmp_path: Path, transformers_4: bool) -> None:
    ropes = {"full_attention": ROPES["linear"], "sliding_attention": {**ROPES["default"], "rope_theta": 77.0}}
    model = make_checkpoint(tmp_path, "gemma3_text", rope=ropes, num_hidden_layers=3)
    if transformers_4:
        scaling = {"rope_type": "linear", "factor": ROPES["linear"]["factor"]}
        flat = {"rope_theta": 10_000.0, "rope_scaling": scaling, "rope_local_base_freq": 77.0}
        edit_json(tmp_path / "config.json", rope_parameters=..., **flat)
    checkpoint = check_logits(tmp_path, model, lengths=(17, 100, 300))
    local, full = ({layer.attention.rotation.rope for layer in checkpoint.spec.layers[i::2]} for i in (0, 1))
    assert {rope.theta for rope in local if rope} == {77.0}
    assert {rope.kind for rope in full if rope} == {"linear"}


@pytest.mark.parametrize(
    ("family", "stated"), [("llama", {}), ("phi3", {"factor": 3.0}), ("llama", {"attention_factor": 1.4})]
)
def test_longrope(tmp_path: Path, family: str, stated: dict[str, Any]) -> None:
    """Prompts up to the original positions use the short factors, others the long ones."""
    original = LONGROPE["original_max_position_embeddings"]
    more = {"original_max_position_embeddings": original} if family == "phi3" else {}
    model = make_checkpoint(tmp_path, family, rope={**LONGROPE, **stated}, **more)
    checkpoint = check_logits(tmp_path, model, lengths=(2, original, original + 1, 100, 300))
    assert checkpoint.spec.long_rope_beyond == original


def test_dynamic_rope_is_the_default_within_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    check_logits(tmp_path, make_checkpoint(tmp_path, "llama", rope=rope), lengths=(100, 300))


QWEN = {"use_sliding_window": True, "sliding_window": 9}
SOME_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Rare options of each family, combined if possible
UNUSUAL: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope": "llama3", "head_dim": 2}, (None,) * 3),
    ("mistral", {"sliding_window": 24, "head_dim": 80, "rope": "yarn-attention-factor"}, (24, 24, 24)),
    ("mistral", {"sliding_window": 1}, (1, 1, 1)),
    ("mixtral", {"sliding_window": 24, "num_attention_heads": 3, "num_key_value_heads": 1}, (24, 24, 24)),
    ("qwen2", {**QWEN, "max_window_layers": 1, "rope": "yarn"}, (None, 9, 9)),
    ("qwen2", {**QWEN, "use_sliding_window": False}, (None,) * 3),
    ("qwen3", {**QWEN, "attention_bias": True, "layer_types": SOME_LAYERS, "head_dim": 10}, (9, None, 9)),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False}, (None,) * 3),
    ("qwen3_moe", {"attention_bias": True, "decoder_sparse_step": 2, "rope": "linear"}, (None,) * 3),
    ("granite", {"attention_bias": True, "mlp_bias": True, "rope": "yarn-mscale"}, (None,) * 3),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}, (None,) * 3),
    ("phi3", {"sliding_window": 24, "rope": "partial-0.25", "head_dim": 16}, (24, 24, 24)),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "rope": "partial-0.5"}, (None,) * 3),
    ("stablelm", {"use_parallel_residual": True}, (None,) * 3),
    ("gemma", {"attention_bias": True, "hidden_act": "silu", "num_key_value_heads": 4}, (None,) * 3),
    ("gemma2", {"attention_bias": True, "sliding_window": 24, "rope": "yarn-mscale"}, (24, None, 24)),
    ("gemma3_text", {"attention_bias": True, "sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None)),
    ("cohere", {"attention_bias": True, "use_qk_norm": False}, (None,) * 3),
    ("cohere2", {"attention_bias": True, "sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None)),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}, (None,) * 3),
    ("gpt_neox", {"use_parallel_residual": False, "rope": "partial-0.75", "head_dim": 16}, (None,) * 3),
    ("gpt_oss", {"sliding_window": 9, "attention_bias": False, "rope": "yarn"}, (9, None, 9)),
    ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "rope": "yarn-mscale"}, (None,) * 3),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}, (None,) * 3),
]


@pytest.mark.parametrize(("family", "options", "windows"), UNUSUAL)
def test_unusual_options(
    tmp_path: Path, family: str, options: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    if family == "stablelm" and "rope" in options:
        options = {**options, "partial_rotary_factor": 0.5, "head_dim": 16}
    model = make_checkpoint(tmp_path, family, num_hidden_layers=3, **options)
    checkpoint = check_logits(tmp_path, model, lengths=(17, 25, 100))
    assert checkpoint.spec.windows == windows


def test_activations() -> None:
    x = torch.linspace(-4, 4, 41)
    for name, ours in ACTIVATIONS.items():
        torch.testing.assert_close(activation_reference(x, ours), ACT2FN[name](x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_run_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=dtype)
    cast_parameters(model, torch.float32)
    checkpoint = check_logits(tmp_path, model, lengths=(17, 63))
    assert checkpoint.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_run_stays_near_float32(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path, family)
    checkpoint = inspect_checkpoint(tmp_path)
    ops = TorchOps()
    decoder = load_decoder(checkpoint, ops, torch.bfloat16, "cpu", 512)
    prompts = prompts_of(checkpoint.spec.vocab, (17, 63))
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        cast_parameters(model, torch.bfloat16)
        halves = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    for got, want, other in zip(
        run_paged(decoder, ops, prompts, dtype=torch.bfloat16), wanted, halves, strict=True
    ):
        assert got.dtype == torch.float32
        # The median: where two experts are nearly equal, a token may go to the other one
        assert (got - want).abs().median() < 1.5 * (other - want).abs().median() + 1e-3
