"""A KV cache of int8 codes on the CPU: written as the reference writes it, read as the reference reads it, in vectors
and in emulated matrix tiles; a row's bits its own."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.paged_attention import paged_attention_reference
from batchinfer_kernels.rope_store import coded_reference
from tests.examples import examples
from tests.kernels.cpu_cache import codes_laid_out, plain
from tests.kernels.test_copy_parts import BLOCKS, by_place, some_parts
from tests.kernels.test_cpu_attention import tree_case
from tests.kernels.test_cpu_operators import DTYPES, TOLERANCE
from tests.kernels.test_paged_attention import poisoned_case

WAYS = ("none", "emulated")
BF16 = torch.bfloat16


@cache
def operators(way: str = "none") -> CompiledOperators:
    return CompiledOperators(tiles=way, codes=True)


def coded(values):
    """(blocks, heads, block_size, D) as codes and scales, (blocks, heads, block_size); the scale of what nobody wrote
    is NaN, which its values were."""
    blocks, heads, size, dim = values.shape
    codes, scales = coded_reference(values.transpose(1, 2).reshape(-1, heads, dim), torch.int8)
    return (
        codes.view(blocks, size, heads, dim).transpose(1, 2).contiguous(),
        scales.view(blocks, size, heads).transpose(1, 2).contiguous(),
    )


def attend(compiled, q, caches, scales, table, queries, contexts, scale, window=None, share=True, **rules):
    block_size, group = caches[0].shape[2], q.shape[1] // caches[0].shape[1]
    pages = (table.numpy(), compiled.pages(block_size)) if share else ()
    items = attention_items(queries, contexts, group, *pages)
    k, v, laid = codes_laid_out(compiled, *caches, scales, q.element_size())
    return compiled.paged_attention(q, k, v, block_size, table, items, scale, window, scales=laid, **rules)


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(WAYS),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 7, 17]),
    dim=st.sampled_from([2, 20, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    window=st.sampled_from([None, 1, 5, 64, 130]),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
    sunk=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=5),
)
@settings(max_examples=examples(20, 200), deadline=None)
def test_attention_equals_the_reference(
    seed, dtype, way, kv_heads, group, dim, block_size, window, soft_cap, sunk, lengths
):
    chunks = [(queries, queries + before) for queries, before in lengths]
    q, values, table = poisoned_case(seed, kv_heads * group, kv_heads, dim, block_size, chunks)
    q, (caches, scales) = q.to(dtype), zip(*map(coded, values), strict=True)
    queries, contexts = [n for n, _ in chunks], [c for _, c in chunks]
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(q.shape[1]) * 3 if sunk else None}
    step = (table, queries, contexts, 0.3, window)
    wanted = paged_attention_reference(q, *caches, *step, **rules, k_scale=scales[0], v_scale=scales[1])
    got = attend(operators(way), q, caches, scales, *step, **rules)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    for row, (count, context) in enumerate(chunks):  # what the window of a chunk's first query has left
        left = 0 if window is None else max(0, context - count - window + 1)
        for scale in scales:
            scale[table[row, : left // block_size].long()] = float("nan")
    again = attend(operators(way), q, caches, scales, *step, share=False, **rules)
    assert torch.equal(again, got), "a block is read that a window has left"


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(WAYS),
    group=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([20, 64]),
    block_size=st.sampled_from([16, 64, 5]),
    children=st.integers(2, 4),
    depths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
@settings(max_examples=examples(8, 40), deadline=None)
def test_shared_prefixes_change_no_bit(seed, dtype, way, group, dim, block_size, children, depths):
    q, values, table, contexts = tree_case(seed, dtype, 2, group, dim, block_size, children, depths, own=2)
    caches, scales = zip(*map(coded, values), strict=True)
    step = (table, [1] * len(contexts), contexts, 0.2)
    together = attend(operators(way), q, caches, scales, *step)
    assert torch.equal(together, attend(operators(way), q, caches, scales, *step, share=False))
    wanted = paged_attention_reference(q, *caches, *step, k_scale=scales[0], v_scale=scales[1])
    torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_step(way, dtype):
    compiled = operators(way)
    q, values, table = poisoned_case(5, 6, 2, 64, 16, [(90, 150), (1, 70), (33, 33)])
    q, (caches, scales) = q.to(dtype), zip(*map(coded, values), strict=True)
    whole = attend(compiled, q, caches, scales, table, [90, 1, 33], [150, 70, 33], 0.2)
    for size in (1, 6, 17, 89):
        for start in range(0, 90, size):
            n = min(size, 90 - start)
            part = attend(
                compiled, q[start : start + n], caches, scales, table[:1], [n], [60 + start + n], 0.2
            )
            assert torch.equal(part, whole[start : start + n])
    assert torch.equal(attend(compiled, q[90:91], caches, scales, table[1:2], [1], [70], 0.2), whole[90:91])


def test_a_broken_key_breaks_those_that_see_it():
    q, values, table = poisoned_case(6, 6, 2, 64, 16, [(20, 90)])
    q, (caches, scales) = q.to(BF16), zip(*map(coded, values), strict=True)
    whole = attend(operators(), q, caches, scales, table, [20], [90], 0.2)
    scales[0][table[0, 5], 1, 2] = float("nan")  # position 82, which the queries from the 12th on see
    got = attend(operators(), q, caches, scales, table, [20], [90], 0.2)
    assert got[12:, 3:].isnan().all()
    got[12:, 3:] = whole[12:, 3:]
    assert torch.equal(got, whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["query", "value"])
def test_what_is_no_number_shows_in_its_heads_alone(what, way):
    """A query's in its own row, a value's in every row that sees it."""
    q, values, table = poisoned_case(6, 6, 2, 64, 16, [(20, 90)])
    q, (caches, scales) = q.to(BF16), zip(*map(coded, values), strict=True)
    step = (table, [20], [90], 0.2)
    whole = attend(operators(way), q, caches, scales, *step)
    if what == "query":
        q[3, 4, 63] = float("inf")
        broken = (slice(3, 4), slice(4, 5))
    else:
        scales[1][table[0, 1], 1, 2] = float("nan")
        broken = (slice(None), slice(3, None))
    got = attend(operators(way), q, caches, scales, *step)
    assert got[broken].isnan().all()
    got[broken] = whole[broken]
    assert torch.equal(got, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_weights_of_any_size_are_as_exact(dtype):
    """Integers of 16 bits have a unit of their own for each row, and for the weights of each of its tiles."""
    q, values, table = poisoned_case(7, 6, 2, 64, 16, [(8, 300)])
    q = (q * torch.logspace(-36, 0, 8)[:, None, None]).to(dtype)
    q[5], q[6, :, 1:] = 0, 0
    values[1][:, :, 3:7] *= 1e-3
    caches, scales = zip(*map(coded, values), strict=True)
    step = (table, [8], [300], 0.3)
    wanted = paged_attention_reference(q, *caches, *step, k_scale=scales[0], v_scale=scales[1])
    got = attend(operators(), q, caches, scales, *step)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])


def rows_to_store(tokens, kv_heads, dim, dtype, seed):
    torch.manual_seed(seed)
    both = torch.randn(tokens, 2 + 2 * kv_heads, dim) * torch.logspace(-3, 2, tokens)[:, None, None]
    both[0, 2:] = 0  # all of a head's values
    both[-1, 2, 0], both[-1, -1, 1] = float("nan"), float("inf")
    both = both.to(dtype)
    return both[:, :2], both[:, 2 : 2 + kv_heads], both[:, 2 + kv_heads :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "dim", "normed"), [(16, 64, False), (5, 20, True), (40, 128, True)])
def test_codes_and_scales_are_those_of_what_a_cache_of_values_holds(dtype, block_size, dim, normed):
    """To the last bit, wherever tokens of a run and single ones go; nothing else is written."""
    compiled, tokens, kv_heads = operators(), 37, 3
    q, k, v = rows_to_store(tokens, kv_heads, dim, dtype, seed=dim)
    angles = torch.randn(100, dim // 2)
    positions = torch.arange(40, 40 + tokens)
    blocks = -(-2 * tokens // block_size)
    slots = torch.cat((torch.arange(3, 3 + 20), torch.randperm(tokens - 20) + 30))
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else (None, None)
    shape = (blocks, *compiled.cache_shape(kv_heads, block_size, dim))
    kept = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    codes = [torch.full(shape, -128, dtype=torch.int8) for _ in range(2)]
    scales = tuple(torch.full(shape[:3], 7.0) for _ in range(2))
    step = (q, k, v, angles.cos(), angles.sin(), positions)
    same = compiled.rope_store(*step, *kept, block_size, slots, *norms)
    got = compiled.rope_store(*step, *codes, block_size, slots, *norms, scales=scales)
    assert torch.equal(got, same)
    values = plain(*kept, block_size, dim)
    found = plain(*codes, block_size, dim, dtype.itemsize)
    at = (slots // block_size, slice(None), slots % block_size)
    for value, code, scale in zip(values, found, scales, strict=True):
        wanted, wanted_scales = coded_reference(value[at], torch.int8)
        torch.testing.assert_close(scale[at], wanted_scales, rtol=0, atol=0, equal_nan=True)
        finite = wanted_scales.isfinite()
        assert torch.equal(code[at][finite], wanted[finite])
        assert not finite.all(), "the case has no broken head"
        untouched = torch.ones(blocks, block_size, dtype=torch.bool)
        untouched[at[0], at[2]] = False
        assert (code.transpose(1, 2)[untouched] == -128).all()
        assert (scale[:, :, :block_size].transpose(1, 2)[untouched] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 5, 12), (2, 64, 20)], ids=str)
def test_parts_are_copied_with_their_scales(shape, dtype):
    parts, heads = some_parts(shape[1], seed=3), shape[0]
    caches = [torch.randint(-127, 128, (BLOCKS, *shape), dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(BLOCKS, heads, shape[1]) for _ in range(2)]
    k, v, laid = codes_laid_out(operators(), *caches, scales, dtype.itemsize)
    operators().copy_parts(k, v, torch.tensor(parts), laid, dtype)
    for found, cache_ in zip(plain(k, v, *shape[1:], dtype.itemsize), caches, strict=True):
        assert torch.equal(found, by_place(cache_, parts))
    for found, scale in zip(laid, scales, strict=True):
        assert torch.equal(found[:, :, : shape[1]], by_place(scale, parts))


def test_a_cache_of_codes_is_refused_where_nobody_asked_for_it():
    plain_ones, codes = CompiledOperators(tiles="none"), torch.zeros(1, 1, 16, 16, dtype=torch.int8)
    scales = (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    assert operators().keeps_codes
    assert not plain_ones.keeps_codes
    items, table = attention_items([1], [1], 1), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="were not asked for"):
        plain_ones.paged_attention(torch.zeros(1, 1, 16), codes, codes, 16, table, items, 1.0, scales=scales)
    with pytest.raises(ValueError, match=r"a cache of torch.int8 has no scale"):
        operators().copy_parts(codes, codes, torch.zeros(1, 4, dtype=torch.int64), None, BF16)
