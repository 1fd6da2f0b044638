"""Compiled attention over caches of values and int8, in vectors and in emulated matrix tiles: equal to the
reference, and bit by bit independent of how a step is split and shared.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.attention_plan import MAX_ROWS, attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.paged_attention import grouped_attention
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.rope_store import quantize_heads_reference
from tests.examples import examples
from tests.kernels.cpu_cache import codes_laid_out, plain
from tests.kernels.cpu_kit import DTYPES, TOLERANCE, operators
from tests.kernels.cpu_steps import Step, assert_rows_are_their_own, poisoned_step, tree_step
from tests.kernels.refused import assert_refused
from tests.kernels.test_copy_parts import BLOCKS, by_place, some_parts

BF16 = torch.bfloat16
# Way to multiply, dtype, and whether caches are quantised
KINDS = [
    *((None, dtype, False) for dtype in DTYPES),
    ("emulated", BF16, False),
    *((way, dtype, True) for way in ("none", "emulated") for dtype in DTYPES),
]
COMPILED = operators("none", codes=True)
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6)


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    dim=st.sampled_from([2, 20, 64, 96]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    window=st.sampled_from([None, 1, 5, 63, 64, 130]),
    biased=st.booleans(),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=5),
)
@settings(max_examples=examples(20, 380), deadline=None)
def test_bidirectional_attention_over_whole_texts(
    seed, kind, kv_heads, group, dim, block_size, window, biased, lengths
):
    """Compiled and torch operators, with distance biases; bits are equal in any batch."""
    way, dtype, codes = kind
    chunks = [(length, length) for length in lengths]
    step = poisoned_step(seed, kv_heads * group, kv_heads, dim, block_size, chunks).to(dtype, codes)
    bias = torch.randn(kv_heads * group, 2 * max(lengths)) if biased else None
    rules = {"causal": False, "bias": bias}
    got, wanted = step.attend(operators(way, codes), window, **rules), step.reference(window, **rules)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    alone = step.part(len(chunks) - 1, 0, lengths[-1])
    assert torch.equal(alone.attend(operators(way, codes), window, **rules), got[-lengths[-1] :])
    if not codes:
        groups = step.groups(window, causal=False)
        grouped = grouped_attention(step.q, step.k, step.v, groups, ScoreRules(0.3, window, bias=bias))
        torch.testing.assert_close(grouped, wanted, **TOLERANCE[dtype])


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 7, 16, 17, examples(17, 48)]),
    dim=st.sampled_from([2, 20, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 4, 16, 21, 32, 100]),
    window=st.sampled_from([None, 1, 5, 63, 64, 130]),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
    sunk=st.booleans(),
    lengths=LENGTHS,
)
@settings(max_examples=examples(30, 380), deadline=None)
def test_equals_the_reference(seed, kind, kv_heads, group, dim, block_size, window, soft_cap, sunk, lengths):
    way, dtype, codes = kind
    chunks = [(queries, queries + before) for queries, before in lengths]
    step = poisoned_step(seed, kv_heads * group, kv_heads, dim, block_size, chunks).to(dtype, codes)
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(step.q.shape[1]) * 3 if sunk else None}
    got = step.attend(operators(way, codes), window, **rules)
    torch.testing.assert_close(got, step.reference(window, **rules), **TOLERANCE[dtype])
    step.leave_behind(window)
    left = step.attend(operators(way, codes), window, share=False, **rules)
    assert torch.equal(left, got), "a block is read that a window has left"


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([20, 64, 80]),
    block_size=st.sampled_from([16, 64, 5]),
    children=st.integers(2, 5),
    depths=st.lists(st.integers(1, 12), min_size=1, max_size=examples(2, 3)),
    window=st.sampled_from([None, 40, 1000]),
    special=st.booleans(),
    few=st.sampled_from([(1,), (1, 1, 4), (3, 16, 17, 1)]),
)
@settings(max_examples=examples(8, 120), deadline=None)
def test_shared_prefixes_of_several_levels_change_no_bit(
    seed, kind, group, dim, block_size, children, depths, window, special, few
):
    """Random trees of prefixes, with and without drafts.

    Args:
        special: if True, with a soft cap and sinks.
        few: queries per sequence; several if it has drafts.
    """
    way, dtype, codes = kind
    step = tree_step(seed, 2, group, dim, block_size, children, depths, 2, few).to(dtype, codes)
    rules = {"soft_cap": 3.0, "sinks": torch.arange(-1.0, step.q.shape[1] - 1)} if special else {}
    together = step.attend(operators(way, codes), window, **rules)
    assert torch.equal(together, step.attend(operators(way, codes), window, share=False, **rules))
    torch.testing.assert_close(together, step.reference(window, **rules), **TOLERANCE[dtype])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("way", "dtype", "codes"), KINDS)
def test_a_row_does_not_depend_on_its_step(way, dtype, codes):
    step = poisoned_step(5, 6, 2, 64, 16, [(90, 150), (1, 70), (33, 33)]).to(dtype, codes)
    assert_rows_are_their_own(step, operators(way, codes))


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize(("way", "dtype", "codes"), KINDS)
def test_nan_and_infinity_appear_only_where_they_are_visible(way, dtype, codes, what):
    """A query's in its own row and head, a key's or value's in all rows that attend to it, in its heads."""
    step = poisoned_step(6, 6, 2, 64, 16, [(20, 90)]).to(dtype, codes)
    whole = step.attend(operators(way, codes))
    if what == "query":
        step.q[3, 4, 63] = float("inf")
        broken = (slice(3, 4), slice(4, 5))
    else:  # of position 82, visible to queries from the 12th on, or of position 18, visible to all
        k, v = step.scales or (step.k[..., 5], step.v)
        seen, cache, block = (12, k, 5) if what == "key" else (0, v, 1)
        cache[step.table[0, block], 1, 2] = float("nan")
        broken = (slice(seen, None), slice(3, None))
    got = step.attend(operators(way, codes))
    assert got[broken].isnan().all()
    got[broken] = whole[broken]
    assert torch.equal(got, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_any_key_that_is_seen_reaches_the_output(dtype):
    """In any tile and lane, alone or with other NaNs, in full and nearly empty tiles."""
    torch.manual_seed(0)
    compiled, tile, dim = operators(), operators().tile, 20
    k, v = torch.randn(8 * 16, dim), torch.randn(8, 1, 16, dim)
    for position in range(2 * tile if tile <= 64 else 128):
        table = torch.arange(position // 16 + 1, dtype=torch.int32)[None]
        cases = [(position, position + 1, None)]
        if position >= tile:
            cases += [(tile, position + 1, None), (tile - 1, tile, position - tile + 2)]
        for start, end, window in cases:
            broken = k.clone()
            broken[start:end] = float("nan")
            step = Step(torch.randn(1, 1, dim), broken.view(8, 1, 16, dim), v, table, [(1, position + 1)])
            assert step.to(dtype).attend(compiled, window).isnan().all(), (position, start, end, window)


def test_large_scores_do_not_overflow():
    k = torch.zeros(3, 1, 16, 64)
    k[1] = 300.0  # the middle block outweighs everything
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    step = Step(torch.full((1, 1, 64), 1000.0), k, torch.randn(3, 1, 16, 64), table, [(1, 48)])
    wanted = step.v[1, 0].mean(0)
    torch.testing.assert_close(step.attend(operators())[0, 0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_attention_is_precise_for_queries_and_weights_of_any_size(dtype):
    """16-bit integers have a scale per row, and per tile for its weights."""
    step = poisoned_step(7, 6, 2, 64, 16, [(8, 300)])
    step = replace(step, q=step.q * torch.logspace(-36, 0, 8)[:, None, None])
    step.q[5], step.q[6, :, 1:] = 0, 0
    step.v[:, :, 3:7] *= 1e-3
    step = step.to(dtype, codes=True)
    torch.testing.assert_close(step.attend(COMPILED), step.reference(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("way", ["none", "emulated"])
def test_how_many_rows_make_an_item_changes_no_bit(way, dtype, codes):
    compiled = operators(way, codes=True)
    step = poisoned_step(11, 9, 3, 64, 16, [(40, 100), (1, 90), (33, 33)]).to(dtype, codes=codes)
    found = [step.attend(compiled, most_rows=rows) for rows in (3, 48, compiled.most_rows)]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_two_levels_are_found():
    compiled, step = operators(), tree_step(0, 1, 1, 64, 16, 4, [16, 16], own=1)
    items = attention_items(step.queries, step.contexts, 1, step.table.numpy(), compiled.pages(16))
    assert items.levels == 3
    tiles = 16 * 16 // compiled.tile
    covered: dict[int, int] = {}
    for first, rows, _, start, end, starts, ends in items.items.tolist():
        for token, position in items.rows[first : first + rows].tolist():
            last = position // compiled.tile + 1 if ends else end
            assert starts == (start == 0)
            covered[token] = covered.get(token, 0) + last - start
    assert covered == {t: (c - 1) // compiled.tile + 1 for t, c in enumerate(step.contexts)}
    shared = sum(end - start for *_, start, end, _, ends in items.items.tolist() if not ends)
    assert shared == 4 * tiles + 16 * tiles  # every node once: 4 documents at the top, 4 below each


def test_work_is_split_without_gap_and_longest_first():
    items = attention_items([1, 40, 3], [500, 40, 100], 3)
    firsts = items.items[:, :2].tolist()
    named = [tuple(row) for first, rows in firsts for row in items.rows[first : first + rows].tolist()]
    assert sorted(named) == sorted(
        [(0, 499)] + [(1 + i, i) for i in range(40)] + [(41 + i, 97 + i) for i in range(3)]
    )
    sizes = [rows * items.rows[first + rows - 1, 1] for first, rows in firsts]
    assert sizes == sorted(sizes, reverse=True)
    assert_refused(f"at most {MAX_ROWS}", attention_items, [1], [1], MAX_ROWS + 1)


def rows_to_store(tokens, kv_heads, dim, dtype, seed):
    torch.manual_seed(seed)
    both = torch.randn(tokens, 2 + 2 * kv_heads, dim) * torch.logspace(-3, 2, tokens)[:, None, None]
    both[0, 2:] = 0  # all of a head's values
    both[-1, 2, 0], both[-1, -1, 1] = float("nan"), float("inf")
    return both.to(dtype).split((2, kv_heads, kv_heads), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "dim", "normed"), [(16, 64, False), (5, 20, True), (40, 128, True)])
def test_rope_store_quantises_exactly_the_values_that_it_would_cache(dtype, block_size, dim, normed):
    """Bit by bit, for tokens of a run and single ones. Nothing else is written."""
    tokens, kv_heads = 37, 3
    q, k, v = rows_to_store(tokens, kv_heads, dim, dtype, seed=dim)
    angles, positions = torch.randn(100, dim // 2), torch.arange(40, 40 + tokens)
    blocks = -(-2 * tokens // block_size)
    slots = torch.cat((torch.arange(3, 3 + 20), torch.randperm(tokens - 20) + 30))
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else (None, None)
    shape = (blocks, *COMPILED.cache_shape(kv_heads, block_size, dim))
    kept = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    codes = [torch.full(shape, -128, dtype=torch.int8) for _ in range(2)]
    scales = tuple(torch.full(shape[:3], 7.0) for _ in range(2))
    step = (q, k, v, angles.cos(), angles.sin(), positions)
    same = COMPILED.rope_store(*step, *kept, block_size, slots, *norms)
    got = COMPILED.rope_store(*step, *codes, block_size, slots, *norms, scales=scales)
    assert torch.equal(got, same)
    at = (slots // block_size, slice(None), slots % block_size)
    untouched = torch.ones(blocks, block_size, dtype=torch.bool)
    untouched[at[0], at[2]] = False
    found = plain(*codes, block_size, dim, dtype.itemsize)
    for value, code, scale in zip(plain(*kept, block_size, dim), found, scales, strict=True):
        wanted, wanted_scales = quantize_heads_reference(value[at], torch.int8)
        torch.testing.assert_close(scale[at], wanted_scales, rtol=0, atol=0, equal_nan=True)
        finite = wanted_scales.isfinite()
        assert torch.equal(code[at][finite], wanted[finite])
        assert not finite.all(), "the case has no broken head"
        assert (code.transpose(1, 2)[untouched] == -128).all()
        assert (scale[:, :, :block_size].transpose(1, 2)[untouched] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 5, 12), (2, 64, 20)], ids=str)
def test_parts_are_copied_with_their_scales(shape, dtype):
    parts, heads = some_parts(shape[1], seed=3), shape[0]
    caches = [torch.randint(-127, 128, (BLOCKS, *shape), dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(BLOCKS, heads, shape[1]) for _ in range(2)]
    k, v, laid = codes_laid_out(COMPILED, *caches, scales, dtype.itemsize)
    COMPILED.copy_parts(k, v, torch.tensor(parts), laid, dtype)
    for found, cache in zip(plain(k, v, *shape[1:], dtype.itemsize), caches, strict=True):
        assert torch.equal(found, by_place(cache, parts))
    for found, scale in zip(laid, scales, strict=True):
        assert torch.equal(found[:, :, : shape[1]], by_place(scale, parts))


def attend_one(compiled: CompiledOperators, q, k, v, block_size=4, **options):
    items, table = attention_items([1], [1], 1), torch.zeros(1, 1, dtype=torch.int32)
    return compiled.paged_attention(q, k, v, block_size, table, items, ScoreRules(1.0), **options)


def test_caches_that_do_not_fit_are_refused():
    compiled, plain_ones, vectors = operators(), CompiledOperators(tiles="none"), operators().lanes
    q, heads_of_5 = torch.ones(1, 1, 6), torch.zeros(1, 2, vectors, vectors).bfloat16()
    no_vectors, fits = torch.ones(1, 1, 4, 6), torch.ones(1, *compiled.cache_shape(2, 4, 8))
    codes, scales = torch.zeros(1, 1, 16, 16, dtype=torch.int8), (torch.zeros(1, 1, 16),) * 2
    assert COMPILED.keeps_codes
    assert not plain_ones.keeps_codes
    assert_refused("blocks are", attend_one, compiled, q, no_vectors, no_vectors)
    with pytest.raises(ValueError, match="planned for 1 query heads a KV head, used with 3"):
        attend_one(compiled, torch.ones(1, 6, 8), fits, fits)
    with pytest.raises(ValueError, match=r"bfloat16, expected .* of torch.float32"):
        attend_one(compiled, torch.ones(1, 2, 8), fits, fits.bfloat16())
    with pytest.raises(ValueError, match=r"heads of 5 values of torch.bfloat16"):
        attend_one(compiled, torch.zeros(1, 2, 5).bfloat16(), heads_of_5, heads_of_5)
    assert_refused("at most 256", compiled.cache_shape, 1, 16, 257)
    with pytest.raises(ValueError, match="are not loaded"):
        attend_one(plain_ones, torch.zeros(1, 1, 16), codes, codes, 16, scales=scales)
    with pytest.raises(ValueError, match=r"a cache of torch.int8 has no scale"):
        COMPILED.copy_parts(codes, codes, torch.zeros(1, 4, dtype=torch.int64), None, BF16)
