"""Tests FlashInfer, FlashAttention-4 and our Gluon kernel for prompts: their arguments, and steps that use
our Triton kernel instead.

Test machines have no such packages: fake modules check the arguments, and another one runs Gluon. Uses the
GPU if there is one, otherwise the interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.prompts import flash_attention, gluon
from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill, PromptTables
from batchinfer.models.ops.prompts.flashinfer import FlashInferPrefill, PromptPages
from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer.models.ops.prompts.trial import LAYERS, PromptSizes, Trial
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import AttentionRules, CacheSpec
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu import hopper_prefill
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.batchinfer.models.ops.prompts import flash_attention_stand_in, flashinfer_stand_in
from tests.batchinfer.models.ops.prompts.steps import BLOCK, DEVICE, DIM, SHAPE, Counted, filled, step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
NO_WINDOW = frozenset([None])


@dataclass
class Reader:
    """A reader of prompts that counts its calls."""

    prefill: type[Any]
    calls: Callable[[], int]

    def ops(self, shape: AttentionShape = SHAPE) -> TritonOps:
        return TritonOps(shape).with_prefill(self.prefill(shape, BLOCK, DEVICE))


@pytest.fixture
def infer(monkeypatch: pytest.MonkeyPatch) -> Reader:
    module = flashinfer_stand_in.stand_in()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    made = module.BatchPrefillWithPagedKVCacheWrapper.made
    return Reader(FlashInferPrefill, lambda: sum(one.runs for one in made))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Reader:
    forward = flash_attention_stand_in.Forward()
    for name, module in flash_attention_stand_in.stand_in(forward).items():
        monkeypatch.setitem(sys.modules, name, module)
    return Reader(FlashAttentionPrefill, lambda: len(forward.calls))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Reader:
    if DEVICE.type == "cuda":
        pytest.skip("tests/kernels/gpu compares the results of GPUs")
    kernel = Counted(hopper_prefill, "_hopper_prefill_kernel", 0)
    monkeypatch.setattr(hopper_prefill, "_hopper_prefill_kernel", kernel)
    return Reader(GluonPrefill, lambda: kernel.launches)


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Reader:
    found: Reader = request.getfixturevalue(request.param)
    return found


def rules_of(rule: str, heads: int = SHAPE.q_heads) -> ScoreRules:
    window, cap, sinks = 9, 1.5, torch.linspace(-1, 2, heads, device=DEVICE)  # float32, as models have them
    return {
        "plain": ScoreRules(0.2),
        "window": ScoreRules(0.2, window),
        "short window": ScoreRules(0.2, BLOCK - 1),
        "soft cap": ScoreRules(0.2, None, cap),
        "sinks": ScoreRules(0.2, None, None, sinks),
        "all": ScoreRules(0.2, window, cap, sinks),
    }[rule]


FEW_HEADS = [replace(SHAPE, q_heads=3, kv_heads=1), replace(SHAPE, q_heads=2)]
CASES = [
    ("infer", "plain", SHAPE),
    *(("flash", rule, SHAPE) for rule in ("plain", "short window", "soft cap", "sinks", "all")),
    *(
        ("flash", "all", shape) for shape in FEW_HEADS
    ),  # with one KV head, blocks have the package's layout anyway
    *(("hopper", rule, SHAPE) for rule in ("plain", "all")),
]
# A prompt; decoding rows before prompts and last chunks; and rows before, between and after prompts
STEPS = [([11], [11]), ([1, 1, 70, 5], [20, 9, 90, 16]), ([1, 3, 1, 1, 9, 1], [17, 8, 25, 1, 9, 30])]


@pytest.mark.sample(10)
@pytest.mark.parametrize(("lens", "contexts"), STEPS)
@pytest.mark.parametrize(("reader", "rule", "shape"), CASES, indirect=["reader"])
def test_results_of_a_step_equal_the_reference(
    reader: Reader, rule: str, shape: AttentionShape, lens: list[int], contexts: list[int]
) -> None:
    ops, inputs, rules = reader.ops(shape), step(lens, contexts), rules_of(rule, shape.q_heads)
    q, cache = filled(ops, inputs, shape)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([rules.window]))
    assert plan.singles.items is None, "prompts are read once"
    wanted = paged_attention_reference(q, cache.k, cache.v, inputs.block_tables, lens, contexts, rules)
    out = torch.full_like(q, torch.nan)
    for given_out in (None, out)[reader.prefill is GluonPrefill :]:
        got = ops.attention(q, cache, plan, rules, given_out)
        assert given_out is None or got is out
        torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert reader.calls() == 2 - (reader.prefill is GluonPrefill)


def unaligned(cache: LayerCache) -> LayerCache:
    """Return equal values at addresses that are no multiples of 16 bytes."""
    moved = torch.zeros(cache.k.numel() + 1, dtype=cache.k.dtype, device=DEVICE)[1:]
    return replace(cache, k=moved.view(cache.k.shape).copy_(cache.k))


@pytest.mark.parametrize(("reader", "kind"), [
    *(("infer", kind) for kind in ("window", "soft cap", "sinks", "codes")),
    *(("flash", kind) for kind in ("codes", "unaligned")),
    *(("hopper", kind) for kind in ("short window", "unaligned")),
], indirect=["reader"])  # fmt: skip
def test_unsupported_steps_use_our_kernel(reader: Reader, kind: str) -> None:
    ops, inputs = reader.ops(), step([1, 9], [12, 20])
    q, cache = filled(ops, inputs)
    if kind == "codes":
        cache = ops.allocate_cache(CacheSpec(2, DIM, dtype="int8"), len(cache.k), BLOCK, SHAPE.dtype, DEVICE)
        cache.k.random_(-127, 127)
    cache = unaligned(cache) if kind == "unaligned" else cache
    rules = rules_of("plain" if kind in ("codes", "unaligned") else kind)
    got, wanted = (
        each.attention(q, cache, each.plan_attention(inputs, BLOCK, frozenset([rules.window])), rules)
        for each in (ops, TritonOps(SHAPE))
    )
    assert torch.equal(got, wanted)
    assert reader.calls() == 0


@pytest.mark.parametrize("reader", ["flash", "hopper"], indirect=True)
def test_steps_with_trees_stay_with_our_kernel(reader: Reader) -> None:
    tree = TreeMask(np.array([8, 8, 8]), np.array([1, 3, 5], np.int32))  # two that follow one
    inputs = replace(step([3], [12]), tree=tree)
    assert reader.ops().plan_attention(inputs, BLOCK, NO_WINDOW).pages is None


OF_FLASH = "it reads from blocks on GPUs of compute capability 9, 10 and 11"
OF_HOPPER = "it is for GPUs of compute capability 9"


@pytest.mark.parametrize(("prefill", "head_dim", "block_size", "major", "reason"), [
    (FlashAttentionPrefill, 128, 16, 9, None),
    (FlashAttentionPrefill, 192, 16, 9, None),
    (FlashAttentionPrefill, 256, 16, 10, None),
    (FlashAttentionPrefill, 128, 32, 11, None),
    (FlashAttentionPrefill, 192, 16, 10, "it has no kernels for heads of 192"),
    (FlashAttentionPrefill, 72, 16, 9, "it has no kernels for heads of 72"),
    (FlashAttentionPrefill, 272, 16, 9, "it has no kernels for heads of 272"),
    (FlashAttentionPrefill, 128, 128, 9, "it would multiply values after the end of a sequence in blocks of 128"),
    *((FlashAttentionPrefill, 128, 16, major, OF_FLASH) for major in (8, 12, None)),
    (GluonPrefill, 128, 16, 9, None),
    *((GluonPrefill, 128, 16, major, OF_HOPPER) for major in (10, None)),
    (GluonPrefill, 100, 16, 9, "the head size 100 is not a multiple of 8 up to 256"),
    (GluonPrefill, 64, 48, 9, "the block size 48 is not a power of 2 from 8 to 128"),
])  # fmt: skip
def test_reasons_against_a_library(
    monkeypatch: pytest.MonkeyPatch,
    prefill: type[FlashAttentionPrefill | GluonPrefill],
    head_dim: int,
    block_size: int,
    major: int | None,
    reason: str | None,
) -> None:
    for module in (flash_attention, gluon):
        monkeypatch.setattr(module, "capability", lambda _: major)
    assert prefill.why_not_here(head_dim, block_size, DEVICE) == reason


def test_gluon_is_available_if_triton_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gluon.has_gluon()
    monkeypatch.setattr(gluon, "capability", lambda _: 9)
    monkeypatch.setattr(gluon, "has_gluon", lambda: False)
    assert GluonPrefill.why_not_here(128, 16, DEVICE) == "this version of triton has no Gluon"


# --- FlashInfer


def test_plans_of_several_steps_take_turns_with_the_wrappers(infer: Reader) -> None:
    """A step is planned once for all layers with equal scales."""
    ops, made = infer.ops(), sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.made
    for length in (5, 6, 7):
        inputs = step([length], [length + 9])
        q, cache = filled(ops, inputs)
        plan = ops.plan_attention(inputs, BLOCK, NO_WINDOW)
        for _ in range(2):
            ops.attention(q, cache, plan, ScoreRules(0.125))
    assert [wrapper.plans for wrapper in made] == [2, 1]
    ops.attention(q, cache, plan, ScoreRules(0.3))
    assert sum(wrapper.plans for wrapper in made) == 4
    assert infer.calls() == 7


def test_single_queries_and_hidden_tables_use_our_kernel() -> None:
    assert PromptPages.of(step([1, 1], [5, 9]), BLOCK) is None
    assert PromptPages.of(replace(step([3], [9]), host_tables=None), BLOCK) is None


# --- FlashAttention-4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    st.sets(st.sampled_from([None, 1, 3, BLOCK, 13]), min_size=1),
)
def test_tables_have_only_blocks_that_queries_see(
    chunks: list[tuple[int, int]], windows: set[int | None]
) -> None:
    lens, contexts = [n for n, _ in chunks], [n + before for n, before in chunks]
    inputs = step(lens, contexts)
    told = PromptTables.of(inputs, BLOCK, frozenset(windows))
    several = [row for row, n in enumerate(lens) if n > 1]
    assert (told is None) == (not several)
    if told is None:
        return
    span = range(several[0], several[-1] + 1)
    assert (told.first, told.last) == (sum(lens[: span[0]]), sum(lens[: span[-1] + 1]))
    assert told.starts.diff().tolist() == [lens[row] for row in span]
    widest = None if None in windows else max(one for one in windows if one is not None)
    for keys, table, row in zip(told.keys.tolist(), told.tables.tolist(), span, strict=True):
        own = inputs.block_tables[row, : -(-contexts[row] // BLOCK)].tolist()
        if lens[row] == 1:
            assert (keys, table[0]) == (1, own[0])
            continue
        least = 0 if widest is None else max(0, contexts[row] - lens[row] - widest + 1)
        assert keys == contexts[row] - least // BLOCK * BLOCK
        assert table[: -(-keys // BLOCK)] == own[least // BLOCK :]


@pytest.mark.parametrize("window", [None, 6])
def test_nan_after_the_end_and_before_the_window_has_no_effect(flash: Reader, window: int | None) -> None:
    """0 × NaN is NaN, and rows with NaN may have left some. Other layers of the step have another window."""
    ops, lens, contexts = flash.ops(), [5, 1, 7], [29, 12, 23]
    inputs, rules = step(lens, contexts), ScoreRules(0.2, window)
    q, cache = filled(ops, inputs)
    wanted = paged_attention_reference(q, cache.k, cache.v, inputs.block_tables, lens, contexts, rules)
    both = ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, frozenset([None, 6, 11])), rules)
    torch.testing.assert_close(both, wanted, atol=4e-3, rtol=4e-3)
    used = torch.zeros(cache.k.shape[0], BLOCK, dtype=torch.bool)
    for row, (n, context) in enumerate(zip(lens, contexts, strict=True)):
        first = 0 if window is None else max(0, context - n - window + 1) // BLOCK * BLOCK
        for key in range(first, context):
            used[inputs.block_tables[row, key // BLOCK], key % BLOCK] = True
    broken = ~used.to(DEVICE)[:, None, :, None]
    for values in (cache.k, cache.v):
        values.masked_fill_(broken, torch.nan)
    got = ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, frozenset([window])), rules)
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert flash.calls() == 2


# --- Gluon


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_quantised_caches_give_the_results_of_our_other_kernel(hopper: Reader, codes: Any) -> None:
    trial = Trial.timed(TritonOps(SHAPE), PromptSizes(tokens=24, longest=24, block_size=BLOCK), 1, DEVICE)
    rules = AttentionRules(9, codes=codes)
    got, wanted = (trial.run(ops, rules) for ops in (hopper.ops(), TritonOps(SHAPE)))
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert hopper.calls() == LAYERS


def test_items_are_only_made_for_chunks_of_several_queries() -> None:
    prefill = GluonPrefill(SHAPE, BLOCK, DEVICE)
    told = prefill.plan(step([1, 70, 1, 2], [5, 100, 8, 2]), NO_WINDOW)
    assert told is not None
    assert told.items.tolist() == [[1, 65, 6, 94, 100], [1, 1, 64, 30, 94], [3, 72, 2, 0, 2]]
    assert prefill.plan(step([1, 1], [5, 9]), NO_WINDOW) is None


def test_quantised_wide_heads_are_unsupported() -> None:
    for dim, codes, reads in ((64, "int8", True), (256, None, True), (256, "int8", False)):
        shape = replace(SHAPE, head_dim=dim)
        cache = TritonOps(shape).allocate_cache(CacheSpec(2, dim, dtype=codes), 2, BLOCK, shape.dtype, DEVICE)
        assert GluonPrefill(shape, BLOCK, DEVICE).can_read(cache) == reads
