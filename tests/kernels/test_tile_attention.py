"""Attention in matrix tiles, emulated: equal to the reference and to vectors within rounding, a row's bits its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import build
from batchinfer_kernels.paged_attention import paged_attention_reference
from tests.examples import examples
from tests.kernels.c_units import assembled
from tests.kernels.test_cpu_attention import attend, tree_case
from tests.kernels.test_cpu_linear import operators
from tests.kernels.test_cpu_operators import TOLERANCE
from tests.kernels.test_paged_attention import leave_behind, poisoned_case

BF16 = torch.bfloat16
X86 = platform.machine() in ("x86_64", "AMD64")


@given(
    seed=st.integers(0, 2**16),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 7, 16, 17, 48]),
    dim=st.sampled_from([2, 20, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 4, 16, 21, 32, 100]),
    window=st.sampled_from([None, 1, 5, 63, 64, 130]),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
    sunk=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=4),
)
@settings(max_examples=examples(12, 100), deadline=None)
def test_equals_the_reference(seed, kv_heads, group, dim, block_size, window, soft_cap, sunk, lengths):
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, caches, table = poisoned_case(seed, kv_heads * group, kv_heads, dim, block_size, chunks)
    q, caches = q.to(BF16), [c.to(BF16) for c in caches]
    queries, contexts = [n for n, _ in chunks], [c for _, c in chunks]
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(q.shape[1]) * 3 if sunk else None}
    step = (table, queries, contexts, 0.3, window)
    wanted = paged_attention_reference(q, *caches, *step, **rules)
    got = attend(operators("emulated"), q, caches, *step, **rules)
    torch.testing.assert_close(got, wanted, **TOLERANCE[BF16])
    vectors = attend(operators("none"), q, caches, *step, **rules)
    torch.testing.assert_close(got, vectors, **TOLERANCE[BF16])
    leave_behind(caches, table, chunks, window)
    left = attend(operators("emulated"), q, caches, *step, share=False, **rules)
    assert torch.equal(left, got), "a block is read that a window has left"


@given(
    seed=st.integers(0, 2**16),
    group=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([20, 64, 80]),
    block_size=st.sampled_from([16, 64, 5]),
    children=st.integers(2, 5),
    depths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    window=st.sampled_from([None, 40, 1000]),
    special=st.booleans(),
)
@settings(max_examples=examples(8, 40), deadline=None)
def test_shared_prefixes_of_several_levels_change_no_bit(
    seed, group, dim, block_size, children, depths, window, special
):
    """`special`: with a soft cap and sinks."""
    compiled = operators("emulated")
    case = tree_case(seed, BF16, 2, group, dim, block_size, children, depths, own=2)
    q, caches, table, contexts = case
    one = [1] * len(contexts)
    rules = {"soft_cap": 3.0, "sinks": torch.arange(-1.0, q.shape[1] - 1)} if special else {}
    together = attend(compiled, q, caches, table, one, contexts, 0.2, window, **rules)
    apart = attend(compiled, q, caches, table, one, contexts, 0.2, window, share=False, **rules)
    assert torch.equal(together, apart)
    wanted = paged_attention_reference(q, *caches, table, one, contexts, 0.2, window, **rules)
    torch.testing.assert_close(together, wanted, **TOLERANCE[BF16])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_step(threads):
    """Whole, in chunks that fill a tile of rows or do not, alone, with others: the same bits."""
    compiled = operators("emulated")
    q, caches, table = poisoned_case(5, 6, 2, 64, 16, [(90, 150), (1, 70), (33, 33)])
    q, caches = q.to(BF16), [c.to(BF16) for c in caches]
    before = torch.get_num_threads()
    whole = attend(compiled, q, caches, table, [90, 1, 33], [150, 70, 33], 0.2)
    try:
        torch.set_num_threads(threads)
        for size in (1, 5, 6, 17, 89):
            for start in range(0, 90, size):
                n = min(size, 90 - start)
                part = attend(compiled, q[start : start + n], caches, table[:1], [n], [60 + start + n], 0.2)
                assert torch.equal(part, whole[start : start + n])
        assert torch.equal(attend(compiled, q[90:91], caches, table[1:2], [1], [70], 0.2), whole[90:91])
        assert torch.equal(attend(compiled, q[91:], caches, table[2:], [33], [33], 0.2), whole[91:])
    finally:
        torch.set_num_threads(before)


def test_a_broken_row_breaks_no_other():
    """A query that is no number fills tiles with others, and shares keys with them."""
    compiled = operators("emulated")
    q, caches, table = poisoned_case(6, 6, 2, 64, 16, [(20, 90)])
    q, caches = q.to(BF16), [c.to(BF16) for c in caches]
    whole = attend(compiled, q, caches, table, [20], [90], 0.2)
    q[7, 1] = float("nan")
    got = attend(compiled, q, caches, table, [20], [90], 0.2)
    assert got[7, 1].isnan().all()
    got[7, 1] = whole[7, 1]
    assert torch.equal(got, whole)


AT_THE_END = """
import torch
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.kernels.guarded_tensor import at_the_end

compiled = CompiledOperators(tiles="emulated")
torch.manual_seed(0)
for dim in (20, 64, 80):
    for block_size in (4, 16, 40):
        shape = (1, *compiled.cache_shape(1, block_size, dim))
        k, v = (at_the_end(torch.randn(shape).bfloat16()) for _ in range(2))
        q = at_the_end(torch.randn(block_size, 3, dim).bfloat16())
        items = attention_items([block_size], [block_size], 3)
        table = torch.zeros(1, 1, dtype=torch.int32)
        assert compiled.paged_attention(q, k, v, block_size, table, items, 0.3).isfinite().all()
print("went through")
"""


def test_nothing_beside_queries_and_cache_is_read():
    """All end where memory does."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "went through"), done.stderr


@pytest.mark.skipif(not X86, reason="no such instructions")
def test_bfloat16_uses_tiles_where_a_cpu_has_them():
    """Compiled for such a CPU, on any; -O1, since it is not run."""
    text = assembled(str(build.FOLDER / "attention_bfloat16.c"), "-march=sapphirerapids", "-O1")
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert instruction in text
