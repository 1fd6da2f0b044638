"""Prompts read by our kernel in Gluon: the items that it is given, and when it is taken. A stand-in for Gluon runs the
kernel, unless there is a GPU that does."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
from triton.compiler.errors import CompilationError

from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.prompts import gluon
from batchinfer.models.ops.prompts.contest import prefill_contest
from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer.models.ops.prompts.trial import LAYERS, PromptSizes, Trial
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import AttentionRules, CacheSpec
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu import hopper_prefill
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.batchinfer.models.ops.prompts.steps import BLOCK, DEVICE, SHAPE, filled, step
from tests.kernels.gpu.gluon_stand_in import Launcher

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
SIZES = PromptSizes(tokens=40, longest=24, block_size=BLOCK)
PLAIN, LOCAL = AttentionRules(), AttentionRules(9, 1.5, True)


class Counted(Launcher):
    """Counts what is launched."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return super().__getitem__(grid)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counted:
    if DEVICE.type == "cuda":
        pytest.skip("what a GPU computes is compared in tests/kernels/gpu")
    made = Counted(hopper_prefill, "_hopper_prefill_kernel", 0)
    monkeypatch.setattr(hopper_prefill, "_hopper_prefill_kernel", made)
    monkeypatch.setattr(gluon, "capability", lambda _: 9)
    return made


def with_kernel(shape: AttentionShape = SHAPE) -> TritonOps:
    return TritonOps(shape).with_prefill(GluonPrefill(shape, BLOCK, DEVICE))


@pytest.mark.sample(2)
@pytest.mark.parametrize("rules", [PLAIN, LOCAL], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("lens", "contexts"),
    [
        (
            [1, 1, 70, 5],
            [20, 9, 90, 16],
        ),  # after rows that decode: several items of one, and an end of whole blocks
        ([1, 3, 1, 1, 9, 1], [17, 8, 25, 1, 9, 30]),  # rows that decode before, between and behind
    ],
)
def test_a_step_s_results_are_those_of_the_reference(kernel, rules, lens, contexts):
    ops, inputs = with_kernel(), step(lens, contexts)
    sinks = torch.linspace(-1, 2, SHAPE.q_heads) if rules.sinks else None
    q, cache = filled(ops, inputs)
    plan = ops.plan_attention(inputs, BLOCK, frozenset([rules.window]))
    assert plan.singles.items is None, "prompts are read once"
    wanted = paged_attention_reference(
        q, cache.k, cache.v, inputs.block_tables, lens, contexts,
        ScoreRules(0.2, rules.window, rules.soft_cap, sinks),
    )  # fmt: skip
    got = ops.attention(q, cache, plan, ScoreRules(0.2, rules.window, rules.soft_cap, sinks))
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert kernel.launches == 1


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_codes_are_read_as_by_the_other(kernel, codes):
    trial = Trial.timed(TritonOps(SHAPE), SIZES, 1, DEVICE)
    rules = AttentionRules(9, codes=codes)
    got, wanted = (trial.run(ops, rules) for ops in (with_kernel(), TritonOps(SHAPE)))
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
    assert kernel.launches == LAYERS


def test_items_are_those_of_chunks_of_several_queries():
    inputs = step([1, 70, 1, 2], [5, 100, 8, 2])
    told = GluonPrefill(replace(SHAPE, q_heads=4, kv_heads=2), BLOCK, DEVICE).plan(inputs, frozenset([None]))
    assert told is not None
    assert told.items.tolist() == [[1, 65, 6, 94, 100], [1, 1, 64, 30, 94], [3, 72, 2, 0, 2]]
    assert GluonPrefill(SHAPE, BLOCK, DEVICE).plan(step([1, 1], [5, 9]), frozenset([None])) is None


def unaligned(cache: LayerCache) -> LayerCache:
    """The same values, at places that are no multiples of 16 bytes."""
    moved = torch.zeros(cache.k.numel() + 1, dtype=cache.k.dtype, device=DEVICE)[1:]
    return replace(cache, k=moved.view(cache.k.shape).copy_(cache.k))


@pytest.mark.parametrize("kind", ["a window within a block", "unaligned"])
def test_what_the_kernel_does_not_read_stays_with_the_other(kernel, kind):
    ops, inputs = with_kernel(), step([1, 9], [12, 20])
    q, cache = filled(ops, inputs)
    window = BLOCK - 1 if kind == "a window within a block" else None
    cache = unaligned(cache) if kind == "unaligned" else cache
    got, wanted = (
        each.attention(
            q, cache, each.plan_attention(inputs, BLOCK, frozenset([window])), ScoreRules(0.125, window)
        )
        for each in (ops, TritonOps(SHAPE))
    )
    assert torch.equal(got, wanted)
    assert kernel.launches == 0


@pytest.mark.parametrize(
    ("dim", "codes", "reads"), [(64, "int8", True), (256, None, True), (256, "int8", False)]
)
def test_which_caches_it_reads(dim, codes, reads):
    shape = replace(SHAPE, head_dim=dim)
    cache = TritonOps(shape).allocate_cache(CacheSpec(2, dim, dtype=codes), 2, BLOCK, shape.dtype, DEVICE)
    assert GluonPrefill(shape, BLOCK, DEVICE).reads(cache) == reads


def test_steps_with_trees_stay_with_the_other(kernel):
    tree = TreeMask(np.array([8, 8, 8]), np.array([1, 3, 5], np.int32))  # two that follow one
    inputs = replace(step([3], [12]), tree=tree)
    assert with_kernel().plan_attention(inputs, BLOCK, frozenset([None])).pages is None


@pytest.mark.parametrize(
    ("head_dim", "block_size", "major", "has", "reason"),
    [
        (128, 16, 9, True, None),
        (128, 16, 10, True, "it is for GPUs of compute capability 9"),
        (128, 16, None, True, "it is for GPUs of compute capability 9"),
        (128, 16, 9, False, "this version of triton has no Gluon"),
        (100, 16, 9, True, "heads of 100 are not a multiple of 8 up to 256"),
        (64, 48, 9, True, "blocks of 48 are not a power of 2 from 8 to 128"),
    ],
)
def test_what_rules_it_out(monkeypatch, head_dim, block_size, major, has, reason):
    monkeypatch.setattr(gluon, "capability", lambda _: major)
    monkeypatch.setattr(gluon, "has_gluon", lambda: has)
    assert GluonPrefill.why_not_here(head_dim, block_size, DEVICE) == reason


def test_gluon_is_where_triton_has_it():
    assert gluon.has_gluon()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("faster", "chosen"), [(True, "triton+gluon"), (False, "triton")])
def test_it_is_taken_where_it_is_faster(kernel, monkeypatch, caplog, faster, chosen):
    """It computes the same; how long an attention takes is said by the kernel that is launched."""
    caplog.set_level(logging.INFO)
    now, attention, made = [0.0], TritonOps.attention, {}  # type: list[float], Any, dict[Any, Any]

    def slowed(ops: TritonOps, q: torch.Tensor, *args: Any) -> torch.Tensor:
        now[0] += (1.0 if faster else 3.0) if ops.name == "triton+gluon" else 2.0
        place = (ops, q)  # the same again is not computed again
        if place not in made:
            made[place] = attention(ops, q, *args)
        return made[place]

    monkeypatch.setattr(TritonOps, "attention", slowed)
    contest = prefill_contest(TritonOps(SHAPE), SIZES, DEVICE, {PLAIN: 1}, lambda: now[0])
    assert contest is not None
    assert contest.winner(contest.decide()).name == chosen
    assert "batchinfer's kernel in triton's Gluon" in caplog.text
    assert kernel.launches > 0


def test_another_result_is_a_warning(kernel, monkeypatch, caplog):
    monkeypatch.setattr(GluonPrefill, "run", lambda *args: args[5].zero_())
    made = prefill_contest(TritonOps(SHAPE), SIZES, DEVICE, {AttentionRules(codes="fp8"): 1})
    assert made is not None
    assert made.winner(made.decide()).name == "triton"
    assert "another version of triton may help" in caplog.text


def test_a_kernel_that_triton_cannot_compile_is_a_warning(kernel, monkeypatch, caplog):
    """Another version's Gluon may be another language. The error is no RuntimeError."""

    def broken(*_: Any, **__: Any) -> None:
        raise CompilationError("def kernel(): ...", None, "no such layout")

    monkeypatch.setattr(hopper_prefill, "hopper_prefill", broken)
    made = prefill_contest(TritonOps(SHAPE), SIZES, DEVICE, {PLAIN: 1})
    assert made is not None
    assert made.winner(made.decide()).name == "triton"
    assert "the kernel does not compile" in caplog.text


def test_deterministic_rows_do_not_depend_on_it(kernel):
    shape = replace(SHAPE, deterministic=True)
    assert prefill_contest(TritonOps(shape), SIZES, DEVICE, {PLAIN: 1}) is None
