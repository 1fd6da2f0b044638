"""Compares encoder attention on a GPU, where tokens see later ones, with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchinfer_kernels.gpu.attention_launch import choose_tiles
from batchinfer_kernels.gpu.attention_plan import plan_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import ScoreRules
from tests.kernels.gpu.attention_cases import DTYPES, SCALE, assert_near, paged_case

# Prompts of one token, around a block's and a tile's end, and of several tiles of queries
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 130)
POSITIONS = 136


def prompts(lengths=LENGTHS, **more):
    return paged_case([(length, length) for length in lengths], **more)


def attended(case, window=None, bias=None, deterministic=False):
    """Attend like a step, with decode attention for single tokens."""
    shape = replace(case.shape, causal=False, deterministic=deterministic)
    lengths = [n for n, _ in case.chunks]
    plan = plan_attention(lengths, lengths, shape, case.q.device, windows=(window,))
    out = case.outputs()
    paged_attention(*case.tensors, plan, ScoreRules(SCALE, window, bias=bias), **case.scaling, **out)
    return out["out"], out["lse"]


def biases(case) -> torch.Tensor:
    heads = case.q.shape[1]
    return 3 * torch.randn(heads, 2 * POSITIONS, generator=torch.Generator().manual_seed(5)).to(case.q.device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_tokens_see_all_of_their_prompt_within_a_window_of_two_sides(device, window, deterministic) -> None:
    case = prompts(device=device)
    wanted = case.reference(window, causal=False)
    for found, one in zip(attended(case, window, deterministic=deterministic), wanted, strict=True):
        assert_near(found, one, torch.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_depend_on_distances_in_any_dtype(device, dtype) -> None:
    case = prompts((130, 1, 17), dtype=dtype, device=device)
    bias = biases(case)
    found, wanted = attended(case, bias=bias), case.reference(causal=False, bias=bias)
    assert_near(found[0], wanted[0], dtype)
    unlike = attended(case)[0]
    assert not torch.allclose(unlike[:130].float(), wanted[0][:130].float(), atol=0.05)
    assert torch.equal(unlike[130], found[0][130]), "a token that only sees itself"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 1, 32), (12, 1, 64), (1, 7, 80), (2, 2, 128)])
def test_heads_of_any_shape(device, kv_heads, group, dim) -> None:
    case = prompts((33, 5, 64), kv_heads=kv_heads, group=group, dim=dim, device=device)
    assert_near(attended(case)[0], case.reference(causal=False)[0], torch.float32)


def test_memory_after_a_prompt_is_not_read(device) -> None:
    """The block after the prompt is poisoned, also if the prompt ends with a tile."""
    keys = choose_tiles("prefill", torch.float32, 64).keys
    case = prompts((keys, 2 * keys, keys - 1), device=device)
    assert not attended(case)[0].isnan().any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [None, 9])
def test_segments_fold_to_the_same(device, window) -> None:
    case = prompts((130, 64, 3), device=device)
    out, lengths = case.outputs(), [n for n, _ in case.chunks]
    step = {"causal": False, "deterministic": True, "segment": 32}
    prefill_attention(*case.tensors, lengths, lengths, ScoreRules(SCALE, window), **step, **out)
    assert_near(out["out"], case.reference(window, causal=False)[0], torch.float32)
