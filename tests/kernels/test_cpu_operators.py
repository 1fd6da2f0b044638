"""The compiled CPU operators equal their references: odd shapes, both dtypes, poisoned caches, any block table."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.compiled import CompiledOperators, attention_items
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.paged_attention import paged_attention_reference
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_store_reference
from tests.kernels.test_paged_attention import poisoned_case

DTYPES = (torch.float32, torch.bfloat16)
# One rounding of the stored type: 2^-24 and 2^-8, with room for sums in another order.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 1.6e-2},
}


@pytest.fixture(scope="session")
def compiled() -> CompiledOperators:
    return CompiledOperators()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 1), (3, 63), (64, 100), (5, 576)])
def test_rms_norm(compiled, dtype, rows, hidden):
    torch.manual_seed(rows)
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((rows, hidden), (rows, hidden), (hidden,)))
    for other in (None, residual):
        got, wanted = compiled.rms_norm(x, weight, 1e-5, other), rms_norm_reference(x, weight, 1e-5, other)
        torch.testing.assert_close(got[0], wanted[0], **TOLERANCE[dtype])
        torch.testing.assert_close(got[1], wanted[1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_gate(compiled, dtype):
    torch.manual_seed(0)
    gate_up = (torch.randn(7, 2 * 33) * 20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.0])
    wanted = gated_activation_reference(gate_up, "silu")
    torch.testing.assert_close(compiled.silu_gate(gate_up), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 20, 64, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store(compiled, dtype, dim, normed):
    torch.manual_seed(dim)
    tokens, heads, kv_heads, block_size = 9, 6, 2, 4
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    angles = torch.rand(50, dim // 2) * 6
    positions = torch.randint(0, 50, (tokens,))
    slots = torch.randperm(5 * block_size)[:tokens]
    norms = [torch.randn(dim).to(dtype) for _ in range(2)] if normed else [None, None]
    caches = [[torch.full((5, kv_heads, block_size, dim), 7.0).to(dtype) for _ in range(2)] for _ in range(2)]
    cos, sin = angles.cos(), angles.sin()
    got = compiled.rope_store(q, k, v, cos, sin, positions, *caches[0], slots, *norms)
    wanted = rope_store_reference(q, k, v, cos[positions], sin[positions], *caches[1], slots, *norms)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.sampled_from([1, 2, 3]),
    share=st.sampled_from([1, 3, 4, 7, 16]),
    dim=st.sampled_from([2, 20, 64, 96, 128, 256]),
    block_size=st.sampled_from([1, 4, 16, 100]),
    window=st.sampled_from([None, 1, 5, 63, 64, 130]),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6),
)
@settings(max_examples=80, deadline=None)
def test_paged_attention(seed, dtype, kv_heads, share, dim, block_size, window, lengths):
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, caches, table = poisoned_case(seed, kv_heads * share, kv_heads, dim, block_size, chunks)
    q, caches = q.to(dtype), [c.to(dtype) for c in caches]
    queries, contexts = [n for n, _ in chunks], [c for _, c in chunks]
    wanted = paged_attention_reference(q, *caches, table, queries, contexts, 0.3, window)
    items = attention_items(queries, contexts, share)
    got = CompiledOperators().paged_attention(q, *caches, table, items, 0.3, window)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])


def test_large_scores_do_not_overflow(compiled):
    q, k = torch.full((1, 1, 64), 300.0), torch.zeros(3, 1, 16, 64)
    v = torch.randn(3, 1, 16, 64)
    k[1] = 300.0  # the middle block outweighs everything
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    got = compiled.paged_attention(q, k, v, table, attention_items([1], [48], 1), 1.0)
    torch.testing.assert_close(got[0, 0], v[1, 0].mean(0), atol=1e-5, rtol=1e-5)


def test_nan_in_a_value_reaches_the_output(compiled):
    """Broken weights must show: the flags may not let the compiler assume that there is no NaN."""
    q, k, v = torch.ones(1, 1, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    k[0, 0, 1, 3] = float("nan")
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert compiled.paged_attention(q, k, v, table, attention_items([1], [4], 1), 1.0).isnan().any()
    assert compiled.rms_norm(k[0, 0], torch.ones(8), 1e-5)[0][1].isnan().all()
    assert compiled.silu_gate(k[0, 0]).isnan().any()


def test_work_is_cut_without_gap_and_longest_first():
    items = attention_items([1, 40, 3], [500, 40, 100], 3).tolist()
    assert items[0] == [0, 0, 1, 499]
    covered = sorted((token + i, position + i) for _, token, n, position in items for i in range(n))
    assert covered == sorted(
        [(0, 499)] + [(1 + i, i) for i in range(40)] + [(41 + i, 97 + i) for i in range(3)]
    )
    random.shuffle(items)
    with pytest.raises(ValueError, match="at most 16"):
        attention_items([1], [1], 17)


def test_what_does_not_fit_is_refused(compiled):
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="not contiguous"):
        compiled.rms_norm(x.T, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="float16 is not compiled"):
        compiled.rms_norm(x.half(), torch.ones(8).half(), 1e-5)


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(build.NoCompiler, match="does not run"):
        build.load_library(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.NoCompiler, match="no C compiler"):
        build.load_library(tmp_path)


def test_a_build_is_kept_and_a_failed_one_is_not(monkeypatch, tmp_path):
    build.load_library(tmp_path)
    (built,) = tmp_path.glob("*.so")
    before = built.stat().st_mtime_ns
    build.load_library(tmp_path)
    assert built.stat().st_mtime_ns == before
    monkeypatch.setattr(build, "FLAGS", ("-definitely-not-a-flag",))
    with pytest.raises(build.NoCompiler, match="cannot build"):
        build.load_library(tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*.so"))
