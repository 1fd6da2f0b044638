"""Prompts read by FlashInfer: what it is given, when it is taken, and what happens where it is missing or broken. No
test machine has it: a module with its interface stands in. Runs on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import triton

from batchinfer.engine.config import Agreed, alone
from batchinfer.models.ops import flashinfer_prefill, prefill_choice
from batchinfer.models.ops.flashinfer_prefill import FlashInferPrefill, PromptPages
from batchinfer.models.ops.interface import AttentionInputs, LayerCache, Ops
from batchinfer.models.ops.prefill_choice import PromptSizes, prefill_contest
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.paged_attention import paged_attention_reference
from batchinfer_kernels.step_tables import StepTables
from tests.batchinfer.models.ops.flashinfer_stand_in import stand_in

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
BLOCK, DIM = 8, 64
SHAPE = AttentionShape(torch.float16, 4, 2, DIM)
SIZES = PromptSizes(tokens=40, longest=24, block_size=BLOCK)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> SimpleNamespace:
    module = stand_in(**changed)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_prefill, "is_installed", lambda: True)
    return module


def step(lens: list[int], contexts: list[int], seed: int = 0) -> AttentionInputs:
    """Blocks lie anywhere; tables are padded with block 0."""
    counts = [-(-context // BLOCK) for context in contexts]
    blocks = list(range(1, 1 + sum(counts)))
    random.Random(seed).shuffle(blocks)
    tables = np.zeros((len(lens), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [blocks.pop() for _ in range(count)]
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    on_device = torch.from_numpy(tables).to(DEVICE)
    return AttentionInputs(nothing, nothing, on_device, lens, contexts, StepTables.of(tables))


def filled(ops: Ops, inputs: AttentionInputs) -> tuple[torch.Tensor, LayerCache]:
    torch.manual_seed(1)
    blocks = 2 + sum(-(-context // BLOCK) for context in inputs.context_lens)
    cache = ops.allocate_cache(CacheSpec(2, DIM), blocks, BLOCK, SHAPE.dtype, DEVICE)
    cache.k.normal_()
    cache.v.normal_()
    q = torch.randn(sum(inputs.query_lens), 4, DIM, device=DEVICE).to(SHAPE.dtype)
    return q, cache


def timed(ours_s: float, theirs_s: float) -> Iterator[float]:
    """A clock by which the two are so fast: it is read when timing begins, around each and after each pair."""
    now = 0.0
    yield now
    while True:
        for seconds in (ours_s, theirs_s):
            yield now
            now += seconds
            yield now
        yield now


def chosen(
    ours_s: float, theirs_s: float, ops: Ops | None = None, plain: bool = True, agreed: Agreed = alone
) -> Ops:
    clock = timed(ours_s, theirs_s)
    ops = ops or TritonOps(SHAPE)
    contest = prefill_contest(ops, SIZES, DEVICE, plain, lambda: next(clock))
    return ops if contest is None else contest.winner(agreed(contest.decide))


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
        wanted = paged_attention_reference(q, cache.k, cache.v, inputs.block_tables, lens, contexts, scale)
        for out in (None, torch.full_like(q, torch.nan)):
            got = ops.attention(q, cache, plan, scale, out=out)
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
        ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, frozenset([None])), 0.125)
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
    got = ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, windows), 0.125, **more)
    plain = TritonOps(SHAPE)
    wanted = plain.attention(q, cache, plain.plan_attention(inputs, BLOCK, windows), 0.125, **more)
    assert torch.equal(got, wanted)
    assert not any(wrapper.plans for wrapper in package.BatchPrefillWithPagedKVCacheWrapper.made)


def test_the_faster_one_is_chosen(package, caplog):
    caplog.set_level(logging.INFO)
    assert chosen(0.008, 0.004).name == "triton+flashinfer"
    assert "prompts are read by FlashInfer" in caplog.text
    assert "FlashInfer 0.7.2 takes 1.00 ms a layer, batchinfer's kernel 2.00 ms" in caplog.text
    assert chosen(0.004, 0.008).name == "triton"
    assert chosen(0.0100, 0.0099).name == "triton", "not for a difference that may be noise"


def test_what_another_engine_chose_is_taken_without_timing(package, caplog):
    """Both round differently: a row would get other bits from one engine of a run than from another."""
    caplog.set_level(logging.INFO)
    assert chosen(0.004, 0.008, agreed=lambda _: "FlashInfer").name == "triton+flashinfer"
    assert "read by FlashInfer, which another engine of this run has timed" in caplog.text
    assert chosen(0.008, 0.004, agreed=lambda _: "batchinfer's kernel").name == "triton"
    assert "takes" not in caplog.text, "nothing was timed"


def test_nothing_is_chosen_by_time_where_rows_must_not_depend_on_it(package):
    def asked(_: object) -> str:
        raise AssertionError("a choice was made by time")

    shape = replace(SHAPE, deterministic=True)
    assert chosen(0.008, 0.004, TritonOps(shape), agreed=asked).name == "triton"


def test_timing_ends_when_its_time_is_over(package, monkeypatch):
    runs: list[str] = []
    attention = TritonOps.attention
    monkeypatch.setattr(
        TritonOps, "attention", lambda self, *a, **k: runs.append(self.name) or attention(self, *a, **k)
    )
    assert chosen(prefill_choice.BUDGET_S, 0.1).name == "triton+flashinfer"
    steps = len(prefill_choice.PARTS) * prefill_choice.LAYERS
    assert {name: runs.count(name) for name in runs} == {
        "triton": 2 * steps,
        "triton+flashinfer": 2 * steps,
    }, "once uncounted, once timed"


def test_steps_are_of_the_job_s_sizes():
    whole, eighth = (
        prefill_choice._Trial.random(TritonOps(SHAPE), SIZES, part, DEVICE).inputs
        for part in prefill_choice.PARTS
    )
    assert (whole.query_lens, whole.context_lens) == ([24], [24])
    assert (eighth.query_lens, eighth.context_lens) == ([3] * 13, [3] * 13)
    longer = PromptSizes(tokens=16, longest=70, block_size=BLOCK)
    cut = prefill_choice._Trial.random(TritonOps(SHAPE), longer, 1, DEVICE).inputs
    assert (cut.query_lens, cut.context_lens) == ([16], [70])


REFUSED = {
    "engine.deterministic is true": AttentionShape(torch.float16, 4, 2, DIM, deterministic=True),
    "it has no kernels for float32": AttentionShape(torch.float32, 4, 2, DIM),
    "it has no kernels for heads of 80": AttentionShape(torch.float16, 4, 2, 80),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_rules_it_out_is_logged(package, caplog, reason):
    caplog.set_level(logging.INFO)
    ops = TritonOps(REFUSED[reason])
    assert chosen(2, 1, ops) is ops
    assert f"not used: {reason}" in caplog.text
    assert package.BatchPrefillWithPagedKVCacheWrapper.made == []


def test_models_that_it_does_not_cover_are_not_timed(package, caplog):
    caplog.set_level(logging.INFO)
    latents = TritonOps(SHAPE, latent=True)
    assert chosen(2, 1, latents) is latents
    assert chosen(2, 1, plain=False).name == "triton"
    assert "keeps latents" in caplog.text
    assert "every layer has a window" in caplog.text
    torchs = TorchOps()
    assert chosen(2, 1, torchs) is torchs
    assert package.BatchPrefillWithPagedKVCacheWrapper.made == []


def test_without_the_package_nothing_is_said(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(flashinfer_prefill, "is_installed", lambda: False)
    ops = TritonOps(SHAPE)
    assert chosen(2, 1, ops) is ops
    assert caplog.text == ""


def _no_compiler(*_: object, **__: object) -> None:
    raise RuntimeError(
        "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist\n  more of it"
    )


def _older_plan(self: object, starts: object, page_starts: object, pages: object, last: object) -> None:
    raise AssertionError("its arguments do not fit")


BROKEN = {
    "RuntimeError: Could not find nvcc": {"plan": _no_compiler},
    "TypeError: ": {"plan": _older_plan},
    "ValueError: its results differ from batchinfer's by 0.5": {"offset": 0.5},
    "ValueError: its results differ from batchinfer's by nan": {"offset": float("nan")},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_package_that_does_not_work_is_a_warning(monkeypatch, caplog, reason):
    install(monkeypatch, **BROKEN[reason])
    ops = TritonOps(SHAPE)
    assert chosen(2, 1, ops) is ops
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "FlashInfer" in record.getMessage()
    assert f"cannot be used ({reason}" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_version_that_lacks_the_wrapper_is_a_warning(monkeypatch, caplog):
    module = install(monkeypatch)
    del module.BatchPrefillWithPagedKVCacheWrapper
    assert chosen(2, 1).name == "triton"
    assert "AttributeError" in caplog.text
    assert "batchinfer's own kernel reads prompts" in caplog.text
