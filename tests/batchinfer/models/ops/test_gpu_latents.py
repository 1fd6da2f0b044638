"""Tests attention over latents by Triton operators against torch operators, with and without decompression."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import ExpertWeights, LatentHeads
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.cost import LatentSizes
from tests.examples import examples
from tests.kernels.cpu_steps import Chunks, poisoned_step

pytest.importorskip("triton")
from batchinfer.models.ops import gpu_latents
from batchinfer.models.ops.gpu_latents import LatentPlan, choose_decompressed, group_by_keys
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.gpu.attention_plan import AttentionShape

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
HEADS, RANK, PLAIN, TURNED, VALUE, BLOCK = 3, 40, 12, 8, 10, 16
V3 = LatentSizes(512, 128, 64, 128)
NO_WINDOW = frozenset({None})


def triton_ops(deterministic: bool = False) -> TritonOps:
    return TritonOps(AttentionShape(torch.float32, HEADS, 1, RANK + TURNED, deterministic, latent=True))


def heads_of(ops: Ops) -> LatentHeads:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(HEADS, *shape, generator=generator) / 4 for shape in ((RANK, PLAIN), (VALUE, RANK)))
    return LatentHeads(ops.pack_heads(ExpertWeights(k)), ops.pack_heads(ExpertWeights(v)), RANK, PLAIN)


def step_of(chunks: Chunks) -> tuple[Tensor, LayerCache, AttentionInputs]:
    """Return random latents in a cache whose unused slots are NaN."""
    step = poisoned_step(5, HEADS, 1, RANK + TURNED, BLOCK, chunks)
    q = step.q[..., : PLAIN + TURNED].contiguous()
    nowhere = torch.zeros(len(q), dtype=torch.int64)
    inputs = AttentionInputs(nowhere, nowhere, step.table, step.queries, step.contexts)
    return q, LayerCache(step.k, step.k, BLOCK), inputs


def attended(ops: Ops, chunks: Chunks, out: Tensor | None = None) -> Tensor:
    q, cache, inputs = step_of(chunks)
    plan = ops.plan_attention(inputs, BLOCK, NO_WINDOW)
    return ops.latent_attention(q, cache, plan, heads_of(ops), 0.3, out)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 60), st.just(0)),
            st.tuples(st.integers(1, 60), st.integers(0, 90)),
            st.tuples(st.just(1), st.integers(0, 200)),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=examples(10, 100), deadline=None)
def test_results_equal_torch(lengths):
    """Whole prompts, chunks after a context and single tokens, in any order."""
    chunks = [(queries, queries + earlier) for queries, earlier in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_latents, "LEAST_TOKENS", 1)
        found = attended(triton_ops(), chunks)
    torch.testing.assert_close(found, attended(TorchOps(), chunks), atol=3e-5, rtol=3e-5)


def test_a_step_is_divided_between_both_ways(monkeypatch):
    monkeypatch.setattr(gpu_latents, "LEAST_TOKENS", 20)
    chunks = [(1, 30), (20, 20), (2, 90), (25, 40), (1, 1)]
    q, _, inputs = step_of(chunks)
    ops = triton_ops()
    plan = ops.plan_attention(inputs, BLOCK, NO_WINDOW)
    assert isinstance(plan, LatentPlan)
    work = plan.work(q, heads_of(ops))
    assert plan.work(q, heads_of(ops)) is work, "planned once a step"
    assert [len(group.slots) for group in work.decompressed] == [20, 41], (
        "at most one key per token of the step"
    )
    assert work.rows is not None
    assert work.rows.tolist() == [0, 21, 22]
    out = torch.full((len(q), HEADS, VALUE), torch.nan)
    assert attended(ops, chunks, out) is out
    torch.testing.assert_close(out, attended(TorchOps(), chunks), atol=3e-5, rtol=3e-5)


def test_few_tokens_are_not_decompressed():
    lens = np.array([gpu_latents.LEAST_TOKENS - 1, 1, 0])
    assert not choose_decompressed(lens, lens + np.array([0, 40, 30]), V3).any()
    lens[0] += 1
    assert choose_decompressed(lens, lens + np.array([0, 40, 30]), V3).tolist() == [True, False, False]


def test_a_long_context_is_left_latent():
    """DeepSeek-V3: after 2,000 tokens, decompression is faster for chunks of 164 tokens or more."""
    contexts = np.array([2000, 2000])
    other = 2000
    found = [
        bool(choose_decompressed(np.array([n, other]), contexts + np.array([n, 0]), V3)[0])
        for n in (163, 164)
    ]
    assert found == [False, True]
    assert not choose_decompressed(np.array([300, 1]), contexts + 300, V3).any()


def test_rows_that_are_deterministic_stay_latent():
    _, _, inputs = step_of([(300, 300)])
    plan = triton_ops(deterministic=True).plan_attention(inputs, BLOCK, NO_WINDOW)
    assert not isinstance(plan, LatentPlan)


def test_quantised_heads_stay_latent(monkeypatch):
    monkeypatch.setattr(gpu_latents, "LEAST_TOKENS", 1)
    q, _, inputs = step_of([(30, 30)])
    ops = triton_ops()
    codes = torch.zeros(HEADS, VALUE, RANK, dtype=torch.int8)
    coded = ops.pack_heads(ExpertWeights(codes, scales=torch.ones(HEADS, VALUE)))
    heads = LatentHeads(heads_of(ops).k, coded, RANK, PLAIN)
    plan = ops.plan_attention(inputs, BLOCK, NO_WINDOW)
    assert isinstance(plan, LatentPlan)
    assert not plan.work(q, heads).decompressed


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(50, 90))
def test_groups_have_all_sequences_in_order(keys, most):
    contexts = np.array(keys)
    groups = group_by_keys(np.arange(len(keys)), contexts, most)
    assert np.concatenate(groups).tolist() == [*range(len(keys))]
    assert all(contexts[group].sum() <= most for group in groups)
    assert all(contexts[a].sum() + contexts[b[0]] > most for a, b in pairwise(groups))
