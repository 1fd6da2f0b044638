"""Attention over a cache of latents: the reference against K and V that are made, what torch and C make of it against
the reference, and rows' bits whatever they are computed with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cost import latent_attention_cost
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.paged_attention import (
    SequenceShape,
    build_group,
    group_sequences,
    grouped_latent_attention,
)
from batchinfer_kernels.latent_attention import latent_attention_reference, latent_store_reference
from tests.examples import examples
from tests.kernels.test_cpu_linear import operators
from tests.kernels.test_cpu_operators import DTYPES, TOLERANCE
from tests.kernels.test_paged_attention import poisoned_case

WAYS = (None, "emulated")  # as this machine does it, and in matrix tiles
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6)


def latent_case(seed, heads, rank, turned, block_size, chunks):
    """Of which nothing behind a sequence's end may be read."""
    q, (cache, _), table = poisoned_case(seed, heads, 1, rank + turned, block_size, chunks)
    return q, cache, table, [n for n, _ in chunks], [c for _, c in chunks]


def attend(compiled, q, cache, table, queries, contexts, scale, rank, heads=None, share=True):
    pages = (table.numpy(), compiled.latent_pages(cache.shape[2], q.dtype)) if share else ()
    items = attention_items(queries, contexts, heads or q.shape[1], *pages)
    return compiled.latent_attention(q, cache, table, items, scale, rank)


def test_the_reference_is_attention_of_heads_that_are_made():
    """K and V of every head, made of the latent, give what queries and results multiplied with the same matrices do."""
    torch.manual_seed(3)
    heads, rank, plain, turned, value, context = 3, 10, 6, 4, 5, 23
    latents, shared = torch.randn(context, rank), torch.randn(context, turned)
    k_of, v_of = torch.randn(heads, plain, rank), torch.randn(heads, value, rank)
    q = torch.randn(context, heads, plain + turned)
    k = torch.cat((torch.einsum("kr,hpr->khp", latents, k_of), shared[:, None].expand(-1, heads, -1)), -1)
    v = torch.einsum("kr,hvr->khv", latents, v_of)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
    wanted = torch.einsum("hqk,khv->qhv", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    query = torch.cat((torch.einsum("qhp,hpr->qhr", q[..., :plain], k_of), q[..., plain:]), -1)
    cache = torch.cat((latents, shared), -1)[None, None]
    table = torch.zeros(1, 1, dtype=torch.int32)
    made = latent_attention_reference(query, cache, table, [context], [context], 0.3, rank)
    torch.testing.assert_close(torch.einsum("qhr,hvr->qhv", made, v_of), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 3, 8, 20]),
    rank=st.sampled_from([1, 12, 33, 64]),
    turned=st.sampled_from([2, 8, 32]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    lengths=LENGTHS,
)
@settings(max_examples=examples(20, 80), deadline=None)
def test_equals_the_reference(tiles, seed, dtype, heads, rank, turned, block_size, lengths):
    compiled = operators(tiles)
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, cache, table, queries, contexts = latent_case(seed, heads, rank, turned, block_size, chunks)
    q, cache = q.to(dtype), cache.to(dtype)
    wanted = latent_attention_reference(q, cache, table, queries, contexts, 0.3, rank)
    got = attend(compiled, q, cache, table, queries, contexts, 0.3, rank, heads=4 if heads % 4 == 0 else None)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    shapes, start = [], 0
    for row, (count, context) in enumerate(chunks):
        shapes.append(SequenceShape(row, start, count, context))
        start += count
    groups = [build_group(g, table, block_size, frozenset({None})) for g in group_sequences(shapes)]
    torch.testing.assert_close(
        grouped_latent_attention(q, cache, groups, 0.3, rank), wanted, **TOLERANCE[dtype]
    )


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(3, 9),
    shared=st.integers(2, 40),
    block_size=st.sampled_from([16, 5, 64]),
    own=st.integers(1, 3),
)
@settings(max_examples=examples(10, 40), deadline=None)
def test_a_shared_prefix_changes_no_bit(tiles, seed, dtype, rows, shared, block_size, own):
    compiled, torch_seed = operators(tiles), torch.Generator().manual_seed(seed)
    fresh = iter(range(shared, 10_000))
    table = torch.tensor(
        [[*range(shared), *(next(fresh) for _ in range(own))] for _ in range(rows)], dtype=torch.int32
    )
    cache = torch.randn(int(table.max()) + 1, 1, block_size, 28, generator=torch_seed).to(dtype)
    q = torch.randn(rows, 4, 28, generator=torch_seed).to(dtype)
    one, last = [1] * rows, (shared + own) * block_size
    contexts = [last - row % min(own * block_size, 7) for row in range(rows)]
    together = attend(compiled, q, cache, table, one, contexts, 0.2, 20)
    apart = attend(compiled, q, cache, table, one, contexts, 0.2, 20, share=False)
    assert torch.equal(together, apart)
    wanted = latent_attention_reference(q, cache, table, one, contexts, 0.2, 20)
    torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tiles", WAYS)
def test_a_row_does_not_depend_on_its_step(tiles, dtype, threads):
    compiled, chunks = operators(tiles), [(90, 150), (1, 70), (33, 33)]
    q, cache, table, queries, contexts = latent_case(5, 6, 40, 8, 16, chunks)
    q, cache, before = q.to(dtype), cache.to(dtype), torch.get_num_threads()
    whole = attend(compiled, q, cache, table, queries, contexts, 0.2, 40)
    try:
        torch.set_num_threads(threads)
        for size in (1, 7, 32, 89):
            for start in range(0, 90, size):
                n = min(size, 90 - start)
                part = attend(
                    compiled, q[start : start + n], cache, table[:1], [n], [60 + start + n], 0.2, 40
                )
                assert torch.equal(part, whole[start : start + n])
        assert torch.equal(attend(compiled, q[90:91], cache, table[1:2], [1], [70], 0.2, 40), whole[90:91])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_reaches_the_output(tiles, dtype):
    compiled = operators(tiles)
    q, cache, table, queries, contexts = latent_case(1, 2, 12, 4, 16, [(3, 30), (1, 9)])
    q, cache = q.to(dtype), cache.to(dtype)
    q[3] = float("nan")
    got = attend(compiled, q, cache, table, queries, contexts, 0.2, 12)
    assert got[:3].isfinite().all()
    assert got[3].isnan().all()


AT_THE_END = """
import torch
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.kernels.guarded_tensor import at_the_end

compiled = CompiledOperators(tiles="emulated")
torch.manual_seed(0)
for rank, turned in ((512, 64), (32, 32), (20, 8), (33, 2)):
    for block_size in (4, 16, 40):
        cache = at_the_end(torch.randn(1, 1, block_size, rank + turned).bfloat16())
        q = at_the_end(torch.randn(block_size, 3, rank + turned).bfloat16())
        items = attention_items([block_size], [block_size], 3)
        table = torch.zeros(1, 1, dtype=torch.int32)
        assert compiled.latent_attention(q, cache, table, items, 0.3, rank).isfinite().all()
print("went through")
"""


def test_nothing_beside_queries_and_cache_is_read():
    """All end where memory does."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "went through"), done.stderr


def test_latents_as_large_as_deepseeks():
    """Whole vectors, which are turned where they lie; a block may be cut by a tile."""
    for block_size in (16, 40):
        chunks = [(3, 100), (1, 33)]
        q, cache, table, queries, contexts = latent_case(9, 16, 512, 64, block_size, chunks)
        q, cache = q.bfloat16(), cache.bfloat16()
        wanted = latent_attention_reference(q, cache, table, queries, contexts, 0.05, 512)
        got = attend(operators("emulated"), q, cache, table, queries, contexts, 0.05, 512)
        torch.testing.assert_close(got, wanted, **TOLERANCE[torch.bfloat16])


def test_latent_and_key_lie_beside_one_another():
    torch.manual_seed(2)
    cache, slots = torch.zeros(2, 1, 3, 8), torch.tensor([4, 0])
    latent, k, q = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 3, 4)
    still = torch.ones(2, 2), torch.zeros(2, 2)
    assert torch.equal(latent_store_reference(q, latent, k, *still, cache, slots), q)
    stored = cache.view(-1, 8)
    assert torch.equal(stored[slots], torch.cat((latent, k), -1))
    assert not stored[[1, 2, 3, 5]].any()


def test_cost_counts_both_products():
    found = latent_attention_cost(1, 10, 10, heads=4, width=24, rank=16, itemsize=2)
    assert found.flops == 2 * 10 * 4 * (24 + 16)
    assert found.bytes == 2 * (4 * (24 + 16) + 10 * 24)


def test_what_does_not_fit_is_refused():
    compiled = CompiledOperators()
    q, cache, table, queries, contexts = latent_case(1, 6, 12, 4, 16, [(3, 30)])
    with pytest.raises(ValueError, match="first 17 of 16"):
        attend(compiled, q, cache, table, queries, contexts, 0.2, 17)
    with pytest.raises(ValueError, match="6 heads are not cut into slices of 4"):
        attend(compiled, q, cache, table, queries, contexts, 0.2, 12, heads=4)
    with pytest.raises(ValueError, match="the cache torch"):
        attend(compiled, q, cache.bfloat16(), table, queries, contexts, 0.2, 12)
