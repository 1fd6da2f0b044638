"""Prompts read by FlashAttention-4: what it is given. No test machine has it: a module with its interface stands in,
which checks what that checks. Runs on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.prompts import flash_attention
from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill, PromptTables
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.batchinfer.models.ops.prompts.flash_attention_stand_in import Forward, stand_in
from tests.batchinfer.models.ops.prompts.steps import BLOCK, DEVICE, DIM, SHAPE, filled, step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
SINGLE_HEAD = replace(SHAPE, q_heads=3, kv_heads=1)  # whose blocks lie as the package wants them anyway
EQUAL_HEADS = replace(SHAPE, q_heads=2)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    made = Forward()
    for name, module in stand_in(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def with_library(shape: AttentionShape = SHAPE) -> TritonOps:
    return TritonOps(shape).with_prefill(FlashAttentionPrefill(shape, BLOCK, DEVICE))


def rules_of(shape: AttentionShape, rule: str) -> dict[str, Any]:
    sinks = torch.linspace(-1, 2, shape.q_heads, device=DEVICE)  # float32, as models have them
    return {
        "plain": {},
        "window": {"window": 6},
        "soft cap": {"soft_cap": 1.5},
        "sinks": {"sinks": sinks},
        "all": {"window": 6, "soft_cap": 1.5, "sinks": sinks},
    }[rule]


@pytest.mark.sample(15)
@pytest.mark.parametrize("shape", [SHAPE, SINGLE_HEAD, EQUAL_HEADS], ids=["2 of 4", "1 of 3", "2 of 2"])
@pytest.mark.parametrize("rule", ["plain", "window", "soft cap", "sinks", "all"])
@pytest.mark.parametrize(
    ("lens", "contexts"),
    [
        ([11], [11]),  # a whole prompt
        ([1, 1, 7, 5], [20, 9, 31, 16]),  # after rows that decode: the end of a long one, and of one of whole blocks
        ([1, 3, 1, 1, 9, 1], [17, 8, 25, 1, 9, 30]),  # rows that decode before, between and behind
    ],
)  # fmt: skip
def test_a_step_s_results_are_those_of_the_reference(forward, shape, rule, lens, contexts):
    ops, more = with_library(shape), rules_of(shape, rule)
    inputs = step(lens, contexts)
    q, cache = filled(ops, inputs, shape)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([more.get("window")]))
    assert plan.singles.items is None, "prompts are read once"
    wanted = paged_attention_reference(
        q, cache.k, cache.v, inputs.block_tables, lens, contexts, ScoreRules(0.2, **more)
    )
    for out in (None, torch.full_like(q, torch.nan)):
        got = ops.attention(q, cache, plan, ScoreRules(0.2, **more), out)
        assert out is None or got is out
        torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert len(forward.calls) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    st.sets(st.sampled_from([None, 1, 3, BLOCK, 13]), min_size=1),
)
def test_tables_hold_what_queries_see_and_nothing_that_windows_have_left(chunks, windows):
    lens, contexts = [n for n, _ in chunks], [n + before for n, before in chunks]
    inputs = step(lens, contexts)
    told = PromptTables.of(inputs, BLOCK, frozenset(windows))
    several = [row for row, n in enumerate(lens) if n > 1]
    if not several:
        assert told is None
        return
    span = range(several[0], several[-1] + 1)
    assert (told.first, told.last) == (sum(lens[: span[0]]), sum(lens[: span[-1] + 1]))
    assert told.starts.diff().tolist() == [lens[row] for row in span]
    widest = None if None in windows else max(windows)
    for keys, table, row in zip(told.keys.tolist(), told.tables.tolist(), span, strict=True):
        own = inputs.block_tables[row, : -(-contexts[row] // BLOCK)].tolist()
        if lens[row] == 1:
            assert (keys, table[0]) == (1, own[0])
            continue
        least = 0 if widest is None else max(0, contexts[row] - lens[row] - widest + 1)
        assert keys == contexts[row] - least // BLOCK * BLOCK
        assert table[: -(-keys // BLOCK)] == own[least // BLOCK :]


@pytest.mark.parametrize("window", [None, 6])
def test_what_lies_behind_the_end_and_before_the_window_spoils_nothing(forward, window):
    """0 × NaN is NaN; rows whose numbers broke may have left some."""
    ops, lens, contexts = with_library(), [5, 1, 7], [29, 12, 23]
    inputs = step(lens, contexts)
    q, cache = filled(ops, inputs)
    wanted = paged_attention_reference(
        q, cache.k, cache.v, inputs.block_tables, lens, contexts, ScoreRules(0.2, window)
    )
    used = torch.zeros(cache.k.shape[0], BLOCK, dtype=torch.bool)
    for row, (n, context) in enumerate(zip(lens, contexts, strict=True)):
        first = 0 if window is None else max(0, context - n - window + 1) // BLOCK * BLOCK
        for key in range(first, context):
            used[inputs.block_tables[row, key // BLOCK], key % BLOCK] = True
    broken = ~used.to(DEVICE)[:, None, :, None]
    for values in (cache.k, cache.v):
        values.masked_fill_(broken, torch.nan)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([window]))
    got = ops.attention(q, cache, plan, ScoreRules(0.2, window))
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert forward.calls == [3]


def test_layers_of_one_plan_may_have_windows_and_none(forward):
    ops, lens, contexts = with_library(), [9], [30]
    inputs = step(lens, contexts)
    q, cache = filled(ops, inputs)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([None, 6, 11]))
    for window in (None, 6, 11):
        wanted = paged_attention_reference(
            q, cache.k, cache.v, inputs.block_tables, lens, contexts, ScoreRules(0.2, window)
        )
        got = ops.attention(q, cache, plan, ScoreRules(0.2, window))
        torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert len(forward.calls) == 3


def unaligned(cache: LayerCache) -> LayerCache:
    """The same values, at places that are no multiples of 16 bytes."""
    moved = torch.zeros(cache.k.numel() + 1, dtype=cache.k.dtype, device=DEVICE)[1:]
    return replace(cache, k=moved.view(cache.k.shape).copy_(cache.k))


@pytest.mark.parametrize("kind", ["codes", "unaligned"])
def test_caches_that_it_would_have_to_copy_or_widen_stay_with_our_kernel(forward, kind):
    ops = with_library()
    inputs = step([1, 9], [12, 20])
    q, cache = filled(ops, inputs)
    if kind == "codes":
        cache = ops.allocate_cache(CacheSpec(2, DIM, dtype="int8"), len(cache.k), BLOCK, SHAPE.dtype, DEVICE)
        cache.k.random_(-127, 127)
    else:
        cache = unaligned(cache)
    plain = TritonOps(SHAPE)
    got, wanted = (
        each.attention(q, cache, each.plan_attention(inputs, BLOCK, frozenset([None])), ScoreRules(0.125))
        for each in (ops, plain)
    )
    assert torch.equal(got, wanted)
    assert forward.calls == []


def test_steps_with_trees_stay_with_our_kernel(forward):
    ops = with_library()
    inputs = step([3], [12])
    tree = TreeMask(np.array([8, 8, 8]), np.array([1, 3, 5], np.int32))  # two that follow one
    assert ops.plan_attention(replace(inputs, tree=tree), BLOCK, frozenset([None])).pages is None


@pytest.mark.parametrize(
    ("head_dim", "block_size", "major", "reason"),
    [
        (128, 16, 9, None),
        (192, 16, 9, None),
        (256, 16, 10, None),
        (128, 32, 11, None),
        (192, 16, 10, "it has no kernels for heads of 192"),
        (72, 16, 9, "it has no kernels for heads of 72"),
        (272, 16, 9, "it has no kernels for heads of 272"),
        (128, 128, 9, "it would multiply what lies behind the end of blocks of 128"),
        (128, 16, 8, "it reads from blocks on GPUs of compute capability 9, 10 and 11"),
        (128, 16, 12, "it reads from blocks on GPUs of compute capability 9, 10 and 11"),
        (128, 16, None, "it reads from blocks on GPUs of compute capability 9, 10 and 11"),
    ],
)
def test_what_rules_it_out(monkeypatch, head_dim, block_size, major, reason):
    monkeypatch.setattr(flash_attention, "capability", lambda _: major)
    assert FlashAttentionPrefill.why_not_here(head_dim, block_size, DEVICE) == reason
