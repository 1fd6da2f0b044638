"""Compiled attention: equal to the reference, and equal bit by bit however a step is cut and shared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.attention_plan import MAX_ROWS, attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.paged_attention import paged_attention_reference
from tests.examples import examples
from tests.kernels.cpu_cache import laid_out
from tests.kernels.test_cpu_operators import DTYPES, TOLERANCE
from tests.kernels.test_paged_attention import leave_behind, poisoned_case


@pytest.fixture(scope="module")
def compiled() -> CompiledOperators:
    return CompiledOperators()


def attend(compiled, q, caches, table, queries, contexts, scale, window=None, share=True, **rules):
    block_size, group = caches[0].shape[2], q.shape[1] // caches[0].shape[1]
    pages = (table.numpy(), compiled.pages(block_size)) if share else ()
    items = attention_items(queries, contexts, group, *pages)
    k, v = laid_out(compiled, *caches)
    return compiled.paged_attention(q, k, v, block_size, table, items, scale, window, **rules)


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.sampled_from([1, 2, 3]),
    share=st.sampled_from([1, 3, 4, 7, 16]),
    dim=st.sampled_from([2, 20, 64, 96, 128, 256]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    window=st.sampled_from([None, 1, 5, 63, 64, 130]),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
    sunk=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6),
)
@settings(max_examples=examples(26, 80), deadline=None)
def test_equals_the_reference(seed, dtype, kv_heads, share, dim, block_size, window, soft_cap, sunk, lengths):
    compiled = CompiledOperators()
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, caches, table = poisoned_case(seed, kv_heads * share, kv_heads, dim, block_size, chunks)
    q, caches = q.to(dtype), [c.to(dtype) for c in caches]
    queries, contexts = [n for n, _ in chunks], [c for _, c in chunks]
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(q.shape[1]) * 3 if sunk else None}
    wanted = paged_attention_reference(q, *caches, table, queries, contexts, 0.3, window, **rules)
    got = attend(compiled, q, caches, table, queries, contexts, 0.3, window, **rules)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    leave_behind(caches, table, chunks, window)
    left = attend(compiled, q, caches, table, queries, contexts, 0.3, window, share=False, **rules)
    assert torch.equal(left, got), "a block is read that a window has left"


def tree_case(seed, dtype, kv_heads, group, dim, block_size, children, depths, own):
    """Single queries of sequences whose block tables form a tree: `depths` blocks at each level, then their own."""
    generator = torch.Generator().manual_seed(seed)
    paths = [()]
    fresh = iter(range(10_000))
    for blocks in depths:
        paths = [
            (*path, *shared)
            for path in paths
            for shared in [[next(fresh) for _ in range(blocks)] for _ in range(children)]
        ]
    rows = [(*path, *(next(fresh) for _ in range(own))) for path in paths for _ in range(children)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    table = torch.tensor([rows[i] for i in order], dtype=torch.int32)
    used = int(table.max()) + 1
    caches = [torch.randn(used, kv_heads, block_size, dim, generator=generator).to(dtype) for _ in range(2)]
    q = torch.randn(len(rows), kv_heads * group, dim, generator=generator).to(dtype)
    last = table.shape[1] * block_size
    contexts = [last - i % min(own * block_size, 7) for i in range(len(rows))]
    return q, caches, table, contexts


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([20, 64, 128]),
    block_size=st.sampled_from([16, 64, 5]),
    children=st.integers(2, 5),
    depths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    window=st.sampled_from([None, 40, 1000]),
    special=st.booleans(),
)
@settings(max_examples=examples(8, 40), deadline=None)
def test_shared_prefixes_of_several_levels_change_no_bit(
    seed, dtype, group, dim, block_size, children, depths, window, special
):
    """`special`: with a soft cap and sinks."""
    compiled = CompiledOperators()
    case = tree_case(seed, dtype, 2, group, dim, block_size, children, depths, own=2)
    q, caches, table, contexts = case
    one = [1] * len(contexts)
    rules = {"soft_cap": 3.0, "sinks": torch.arange(-1.0, q.shape[1] - 1)} if special else {}
    together = attend(compiled, q, caches, table, one, contexts, 0.2, window, **rules)
    apart = attend(compiled, q, caches, table, one, contexts, 0.2, window, share=False, **rules)
    assert torch.equal(together, apart)
    wanted = paged_attention_reference(q, *caches, table, one, contexts, 0.2, window, **rules)
    torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])


def test_two_levels_are_found(compiled):
    case = tree_case(0, torch.float32, 1, 1, 64, 16, 4, [16, 16], own=1)
    items = attention_items([1] * len(case[3]), case[3], 1, case[2].numpy(), compiled.pages(16))
    assert items.levels == 3
    tiles = 16 * 16 // compiled.tile
    covered: dict[int, int] = {}
    for first, rows, _, start, end, starts, ends in items.items.tolist():
        for token, position in items.rows[first : first + rows].tolist():
            last = position // compiled.tile + 1 if ends else end
            assert starts == (start == 0)
            covered[token] = covered.get(token, 0) + last - start
    assert covered == {t: (c - 1) // compiled.tile + 1 for t, c in enumerate(case[3])}
    shared = sum(end - start for *_, start, end, _, ends in items.items.tolist() if not ends)
    assert shared == 4 * tiles + 16 * tiles  # every node once: 4 documents at the top, 4 below each


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_step(compiled, dtype, threads):
    """Whole, in chunks of any size, alone, with others, on one thread or two: the same bits."""
    q, caches, table = poisoned_case(5, 6, 2, 64, 16, [(90, 150), (1, 70), (33, 33)])
    q, caches = q.to(dtype), [c.to(dtype) for c in caches]
    before = torch.get_num_threads()
    whole = attend(compiled, q, caches, table, [90, 1, 33], [150, 70, 33], 0.2)
    try:
        torch.set_num_threads(threads)
        for size in (1, 7, 32, 89):
            for start in range(0, 90, size):
                n = min(size, 90 - start)
                part = attend(compiled, q[start : start + n], caches, table[:1], [n], [60 + start + n], 0.2)
                assert torch.equal(part, whole[start : start + n])
        assert torch.equal(attend(compiled, q[90:91], caches, table[1:2], [1], [70], 0.2), whole[90:91])
        assert torch.equal(attend(compiled, q[91:], caches, table[2:], [33], [33], 0.2), whole[91:])
    finally:
        torch.set_num_threads(before)


def test_large_scores_do_not_overflow(compiled):
    q, k = torch.full((1, 1, 64), 300.0), torch.zeros(3, 1, 16, 64)
    v = torch.randn(3, 1, 16, 64)
    k[1] = 300.0  # the middle block outweighs everything
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    got = attend(compiled, q, [k, v], table, [1], [48], 1.0)
    torch.testing.assert_close(got[0, 0], v[1, 0].mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_key_reaches_the_output(compiled, dtype):
    """Broken weights must show: the flags may not let the compiler assume that there is no NaN."""
    q, k, v = (torch.ones(s, dtype=dtype) for s in ((1, 1, 8), (1, 1, 4, 8), (1, 1, 4, 8)))
    k[0, 0, 1, 3] = float("nan")
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert attend(compiled, q, [k, v], table, [1], [4], 1.0).isnan().any()


def test_work_is_cut_without_gap_and_longest_first():
    items = attention_items([1, 40, 3], [500, 40, 100], 3)
    named = [
        tuple(row)
        for first, rows, *_ in items.items.tolist()
        for row in items.rows[first : first + rows].tolist()
    ]
    assert sorted(named) == sorted(
        [(0, 499)] + [(1 + i, i) for i in range(40)] + [(41 + i, 97 + i) for i in range(3)]
    )
    sizes = [rows * items.rows[first + rows - 1, 1] for first, rows, *_ in items.items.tolist()]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ValueError, match=f"at most {MAX_ROWS}"):
        attention_items([1], [1], MAX_ROWS + 1)


def test_a_cache_of_another_layout_is_refused(compiled):
    q, cache = torch.ones(1, 1, 6), torch.ones(1, 1, 4, 6)  # no whole vectors on any CPU
    items = attention_items([1], [4], 1)
    with pytest.raises(ValueError, match="blocks are"):
        compiled.paged_attention(q, cache, cache, 4, torch.zeros(1, 1, dtype=torch.int32), items, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_any_key_that_is_seen_reaches_the_output(compiled, dtype):
    """Whichever tile and lane it stands in, alone or with others, and however little else its tile has."""
    torch.manual_seed(0)
    tile, dim = compiled.tile, 20
    k, v = torch.randn(8 * 16, dim), torch.randn(8, 1, 16, dim).to(dtype)
    for position in range(2 * tile if tile <= 64 else 128):
        table = torch.arange(position // 16 + 1, dtype=torch.int32)[None]
        cases = [(position, position + 1, None)]
        if position >= tile:
            cases += [(tile, position + 1, None), (tile - 1, tile, position - tile + 2)]
        for start, end, window in cases:
            broken = k.clone()
            broken[start:end] = float("nan")
            keys = broken.view(8, 1, 16, dim).to(dtype)
            q = torch.randn(1, 1, dim).to(dtype)
            got = attend(compiled, q, [keys, v], table, [1], [position + 1], 0.2, window)
            assert got.isnan().all(), (position, start, end, window)


def test_items_for_another_group_are_refused(compiled):
    q, cache = torch.ones(1, 6, 8), torch.ones(1, *compiled.cache_shape(2, 4, 8))
    items = attention_items([1], [4], 1)
    with pytest.raises(ValueError, match="planned for 1 query heads a KV head, used with 3"):
        compiled.paged_attention(q, cache, cache, 4, torch.zeros(1, 1, dtype=torch.int32), items, 1.0)


def test_a_cache_of_another_type_is_refused(compiled):
    q, shape = torch.ones(1, 2, 8), (1, *compiled.cache_shape(2, 4, 8))
    caches, items = [torch.ones(shape), torch.ones(shape).bfloat16()], attention_items([1], [4], 1)
    with pytest.raises(ValueError, match=r"bfloat16, wanted .* of torch.float32"):
        compiled.paged_attention(q, *caches, 4, torch.zeros(1, 1, dtype=torch.int32), items, 1.0)
