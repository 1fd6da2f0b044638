"""Prompts read by FlashInfer: what it is given. No test machine has it: a module with its interface stands in. Runs on
the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch

from batchinfer.models.ops.attention import AttentionInputs
from batchinfer.models.ops.prompts.flashinfer import FlashInferPrefill, PromptPages
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.batchinfer.models.ops.prompts.flashinfer_stand_in import stand_in
from tests.batchinfer.models.ops.prompts.steps import BLOCK, DEVICE, DIM, SHAPE, filled, step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = stand_in()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.parametrize(
    ("lens", "contexts"),
    [
        ([11], [11]),  # a whole prompt
        (
            [1, 1, 7, 5],
            [20, 9, 31, 16],
        ),  # after rows that decode: the end of a long one, and of one of whole blocks
        ([1, 3, 1, 1, 9, 1], [17, 8, 25, 1, 9, 30]),  # rows that decode before, between and behind
    ],
)
def test_a_step_s_results_are_those_of_the_reference(package, lens, contexts):
    ops = TritonOps(SHAPE).with_prefill(FlashInferPrefill(SHAPE, BLOCK, DEVICE))
    inputs = step(lens, contexts)
    q, cache = filled(ops, inputs)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([None]))
    for scale in (0.125, 0.3):
        wanted = paged_attention_reference(
            q, cache.k, cache.v, inputs.block_tables, lens, contexts, ScoreRules(scale)
        )
        for out in (None, torch.full_like(q, torch.nan)):
            got = ops.attention(q, cache, plan, ScoreRules(scale), out)
            assert out is None or got is out
            torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    made = package.BatchPrefillWithPagedKVCacheWrapper.made
    assert sum(wrapper.plans for wrapper in made) == 2, "planned once for all layers of a scale"
    assert sum(wrapper.runs for wrapper in made) == 4


def test_plans_of_several_steps_take_turns_with_the_wrappers(package):
    prefill = FlashInferPrefill(SHAPE, BLOCK, DEVICE)
    ops = TritonOps(SHAPE).with_prefill(prefill)
    for length in (5, 6, 7):
        inputs = step([length], [length + 9])
        q, cache = filled(ops, inputs)
        ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, frozenset([None])), ScoreRules(0.125))
    assert [wrapper.plans for wrapper in package.BatchPrefillWithPagedKVCacheWrapper.made] == [2, 1]


def test_single_queries_and_hidden_tables_are_not_for_it(package):
    assert PromptPages.of(step([1, 1], [5, 9]), BLOCK) is None
    shown = step([3], [9])
    hidden = AttentionInputs(
        shown.positions, shown.slots, shown.block_tables, shown.query_lens, shown.context_lens
    )
    assert PromptPages.of(hidden, BLOCK) is None


@pytest.mark.parametrize("rule", ["window", "soft_cap", "sinks", "codes"])
def test_layers_that_it_does_not_cover_stay_with_our_kernel(package, rule):
    ops = TritonOps(SHAPE).with_prefill(FlashInferPrefill(SHAPE, BLOCK, DEVICE))
    inputs = step([1, 9], [12, 20])
    q, cache = filled(ops, inputs)
    windows: frozenset[int | None] = frozenset([None, 6])
    more: dict[str, Any] = {}
    if rule == "codes":
        cache = ops.allocate_cache(CacheSpec(2, DIM, dtype="int8"), len(cache.k), BLOCK, SHAPE.dtype, DEVICE)
        cache.k.random_(-127, 127)
    else:
        sinks = torch.ones(4, device=DEVICE, dtype=SHAPE.dtype)
        more = {rule: {"window": 6, "soft_cap": 5.0, "sinks": sinks}[rule]}
    got = ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, windows), ScoreRules(0.125, **more))
    plain = TritonOps(SHAPE)
    wanted = plain.attention(
        q, cache, plain.plan_attention(inputs, BLOCK, windows), ScoreRules(0.125, **more)
    )
    assert torch.equal(got, wanted)
    assert not any(wrapper.plans for wrapper in package.BatchPrefillWithPagedKVCacheWrapper.made)
