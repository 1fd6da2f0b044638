"""Logits against transformers, for every family and everything that a configuration can vary."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.models.paged import load_decoder, run_paged
from tests.checkpoints import FAMILIES, LONGROPE, ROPES, cast_parameters, edit_json, make_checkpoint
from tests.examples import everything

LENGTHS = (1, 2, 17, 63, 100, 300)
# (tokens of each prompt a step, block size). Small ones take most of the time: `test_small_chunks` has them always.
CHUNKS = ((None, 16), (64, 8), *(((7, 16),) if everything() else ()))

# Families whose rotary embedding may be scaled in the ways that most know
SCALED = [family for family in FAMILIES if family not in ("phi3", "gpt2", "gemma3_text")]


# Families all of whose sizes `make test` may try: drawn configurations vary those of every family there, too
VARIED = ("llama", "qwen3", "gemma2", "gpt_neox", "deepseek_v3")


def thinned(
    cases: Sequence[Any], kept: Sequence[Any], families: Sequence[str] = tuple(FAMILIES)
) -> list[Any]:
    """(family, case) for every family and case; of families that are not VARIED `make test` has only what is `kept`."""
    return [
        pytest.param(family, case, marks=[] if family in VARIED or case in kept else [pytest.mark.slow])
        for family in families
        for case in cases
    ]


def prompts_of(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def check_logits(folder: Path, model: Any, *, lengths: tuple[int, ...] = LENGTHS) -> Checkpoint:
    """Whole prompts in one batch, then in chunks, against transformers one prompt at a time."""
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
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert wanted[-1].std() > 0.3, "logits too flat to tell a right decoder from a wrong one"
    return checkpoint


@pytest.mark.sample(21)
@pytest.mark.parametrize(
    ("family", "how"),
    thinned([(False, 1), (True, 1), (False, 3), (True, 3)], kept=[(True, 1), (False, 3)]),
    ids=str,
)
def test_tied_and_sharded(tmp_path: Path, family: str, how: tuple[bool, int]) -> None:
    tied, shards = how
    model = make_checkpoint(tmp_path, family, tied=tied, shards=shards)
    checkpoint = check_logits(tmp_path, model)
    assert len(checkpoint.files) >= shards
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    assert (head in checkpoint.tensors) is not tied


@pytest.mark.sample(7)
@pytest.mark.parametrize(("family", "chunk"), thinned([1, 7], kept=[7]))
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
    """Tied in config.json, but head and embedding both stored: they are one only when they are equal."""
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


@pytest.mark.parametrize("family", SCALED)
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


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("stated", [{}, {"factor": 3.0}, {"attention_factor": 1.4}])
def test_longrope(tmp_path: Path, family: str, stated: dict[str, Any]) -> None:
    """Prompts up to the original positions are rotated by the short factors, others by the long ones."""
    original = LONGROPE["original_max_position_embeddings"]
    more = {"original_max_position_embeddings": original} if family == "phi3" else {}
    model = make_checkpoint(tmp_path, family, rope={**LONGROPE, **stated}, **more)
    checkpoint = check_logits(tmp_path, model, lengths=(2, original, original + 1, 100, 300))
    assert checkpoint.spec.long_rope_beyond == original


@pytest.mark.parametrize("inverse", [False, True])
def test_scores_scaled_by_layer(tmp_path: Path, inverse: bool) -> None:
    options = {"scale_attn_by_inverse_layer_idx": inverse, "scale_attn_weights": not inverse}
    checkpoint = check_logits(tmp_path, make_checkpoint(tmp_path, "gpt2", **options), lengths=(17, 63))
    first, second = (layer.attention.scale for layer in checkpoint.spec.layers)
    assert first == (2 * second if inverse else second)


def test_dynamic_rope_is_the_default_within_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    check_logits(tmp_path, make_checkpoint(tmp_path, "llama", rope=rope), lengths=(100, 300))


@pytest.mark.sample(18)
@pytest.mark.parametrize(
    ("family", "rope"), thinned([name for name in ROPES if name != "default"], ["yarn-mscale"], SCALED)
)
def test_rope_variants(tmp_path: Path, family: str, rope: str) -> None:
    check_logits(tmp_path, make_checkpoint(tmp_path, family, rope=rope), lengths=(17, 100, 300))


@pytest.mark.sample(10)
@pytest.mark.parametrize(("family", "head_dim"), thinned([2, 10, 20, 24, 80, 96], kept=[]))
def test_odd_head_sizes(tmp_path: Path, family: str, head_dim: int) -> None:
    check_logits(tmp_path, make_checkpoint(tmp_path, family, head_dim=head_dim), lengths=(2, 63))


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("family", "heads"), thinned([(3, 3), (3, 1), (6, 2), (4, 1), (8, 2)], kept=[(6, 2)]), ids=str
)
def test_query_groups(tmp_path: Path, family: str, heads: tuple[int, int]) -> None:
    q_heads, kv_heads = heads
    model = make_checkpoint(
        tmp_path, family, num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=16
    )
    check_logits(tmp_path, model, lengths=(1, 17, 63))


@pytest.mark.parametrize("family", ["phi3", "stablelm", "gpt_neox"])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_a_part_of_each_head_is_rotated(tmp_path: Path, family: str, part: float) -> None:
    more = {"partial_rotary_factor": part} if family == "stablelm" else {}
    model = make_checkpoint(tmp_path, family, rope=f"partial-{part}", head_dim=16, **more)
    checkpoint = check_logits(tmp_path, model)
    assert checkpoint.spec.attention.rotation.dim == int(16 * part)


@pytest.mark.parametrize("biased", [False, True])
def test_both_halves_of_a_layer_side_by_side(tmp_path: Path, biased: bool) -> None:
    model = make_checkpoint(tmp_path, "stablelm", use_parallel_residual=True, use_qkv_bias=biased)
    checkpoint = check_logits(tmp_path, model)
    assert checkpoint.spec.layers[0].parallel


def test_one_half_after_the_other(tmp_path: Path) -> None:
    checkpoint = check_logits(tmp_path, make_checkpoint(tmp_path, "gpt_neox", use_parallel_residual=False))
    assert not checkpoint.spec.layers[0].parallel


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("olmo2", {"attention_bias": True}),
        ("stablelm", {"use_qkv_bias": True}),
        ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3_text", {"attention_bias": True}),
        ("cohere", {"attention_bias": True}),
        ("cohere2", {"attention_bias": True}),
    ],
)
def test_biases(tmp_path: Path, family: str, biases: dict[str, bool]) -> None:
    checkpoint = check_logits(tmp_path, make_checkpoint(tmp_path, family, **biases), lengths=(2, 63))
    assert any(name.endswith("bias") for name in checkpoint.tensors)


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("mistral", {"sliding_window": 24}, (24, 24, 24)),
        ("mistral", {"sliding_window": 1}, (1, 1, 1)),
        ("phi3", {"sliding_window": 24}, (24, 24, 24)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
            (None, 24, 24),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
            (None, None, 40),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9}, (None, None, None)),
        ("gemma2", {"sliding_window": 24}, (24, None, 24)),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None)),
        ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None)),
    ],
)
def test_sliding_windows(
    tmp_path: Path, family: str, options: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    model = make_checkpoint(tmp_path, family, num_hidden_layers=3, **options)
    checkpoint = check_logits(tmp_path, model, lengths=(17, 25, 100, 300))
    assert checkpoint.spec.windows == windows


@pytest.mark.parametrize(
    "activation",
    ["gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python", "swish"],
)
def test_activations(tmp_path: Path, activation: str) -> None:
    check_logits(tmp_path, make_checkpoint(tmp_path, "llama", hidden_act=activation), lengths=(63,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_run_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=dtype)
    cast_parameters(model, torch.float32)
    checkpoint = check_logits(tmp_path, model, lengths=(17, 63))
    assert checkpoint.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.sample(7)
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
