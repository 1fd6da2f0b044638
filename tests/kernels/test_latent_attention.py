"""Attention over a cache of latents: the reference compared with decompressed K and V, torch and C compared with the
reference, and rows' bits independent of other rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.paged_attention import grouped_latent_attention
from batchinfer_kernels.latent_attention import (
    decompressed_attention_reference,
    latent_attention_reference,
    latent_store_reference,
)
from tests.examples import examples
from tests.kernels.cpu_kit import DTYPES, TOLERANCE, operators
from tests.kernels.cpu_steps import LatentStep, assert_rows_are_their_own, latent_step, tree_step

WAYS = (None, "emulated")  # as this machine does it, and in matrix tiles
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6)


def test_the_reference_equals_attention_of_decompressed_heads():
    """Decompressing K and V of every head gives the same results as multiplying queries and outputs."""
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
    lens = [context - 5, 5]  # the rest of it, and another sequence
    parts = (
        of.repeat(1, 2, 1)[:, : context + 5] for of in (k[..., :plain].transpose(0, 1), v.transpose(0, 1))
    )
    twice = torch.cat((q[5:], q[:5]))
    found = decompressed_attention_reference(
        twice, *parts, shared.repeat(2, 1)[: context + 5], lens, [context, 5], 0.3
    )
    torch.testing.assert_close(found, torch.cat((wanted[5:], wanted[:5])), atol=1e-5, rtol=1e-5)


@given(
    seed=st.integers(0, 2**16),
    tiles=st.sampled_from(WAYS),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 3, 8, 20]),
    rank=st.sampled_from([1, 12, 33, 64]),
    turned=st.sampled_from([2, 8, 32]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    lengths=LENGTHS,
)
@settings(max_examples=examples(25, 160), deadline=None)
def test_equals_the_reference(seed, tiles, dtype, heads, rank, turned, block_size, lengths):
    chunks = [(queries, queries + before) for queries, before in lengths]
    step = latent_step(seed, heads, rank, turned, block_size, chunks).to(dtype)
    wanted = step.reference()
    got = step.attend(operators(tiles), heads=4 if heads % 4 == 0 else None)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    with_torch = grouped_latent_attention(step.q, step.k, step.groups(), 0.3, rank)
    torch.testing.assert_close(with_torch, wanted, **TOLERANCE[dtype])


@given(
    seed=st.integers(0, 2**16),
    tiles=st.sampled_from(WAYS),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(2, 5),
    shared=st.integers(2, 40),
    block_size=st.sampled_from([16, 5, 64]),
    own=st.integers(1, 3),
)
@settings(max_examples=examples(12, 80), deadline=None)
def test_a_shared_prefix_changes_no_bit(seed, tiles, dtype, rows, shared, block_size, own):
    tree = tree_step(seed, 1, 4, 28, block_size, rows, [shared], own)
    step = LatentStep(**vars(tree), rank=20).to(dtype)
    together = step.attend(operators(tiles))
    assert torch.equal(together, step.attend(operators(tiles), share=False))
    torch.testing.assert_close(together, step.reference(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", WAYS)
def test_a_row_does_not_depend_on_its_step(tiles, dtype):
    step = latent_step(5, 6, 40, 8, 16, [(90, 150), (1, 70), (33, 33)]).to(dtype)
    assert_rows_are_their_own(step, operators(tiles))


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_reaches_the_output(tiles, dtype):
    step = latent_step(1, 2, 12, 4, 16, [(3, 30), (1, 9)]).to(dtype)
    step.q[3] = float("nan")
    got = step.attend(operators(tiles))
    assert got[:3].isfinite().all()
    assert got[3].isnan().all()


@pytest.mark.parametrize("block_size", [16, 40])
def test_latents_of_deepseeks_size(block_size):
    """Whole vectors are rotated in place; a tile may end inside a block."""
    step = latent_step(9, 16, 512, 64, block_size, [(3, 100), (1, 33)]).to(torch.bfloat16)
    torch.testing.assert_close(
        step.attend(operators("emulated")), step.reference(), **TOLERANCE[torch.bfloat16]
    )


def test_latents_and_keys_are_adjacent():
    torch.manual_seed(2)
    cache, slots = torch.zeros(2, 1, 3, 8), torch.tensor([4, 0])
    latent, k, q = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 3, 4)
    still = torch.ones(2, 2), torch.zeros(2, 2)
    assert torch.equal(latent_store_reference(q, latent, k, *still, cache, slots), q)
    stored = cache.view(-1, 8)
    assert torch.equal(stored[slots], torch.cat((latent, k), -1))
    assert not stored[[1, 2, 3, 5]].any()


@pytest.mark.parametrize(
    ("change", "heads", "words"),
    [
        ({"rank": 17}, None, "17 of 16"),
        ({}, 4, "6 heads cannot be cut into slices of 4"),
        ({"k": torch.zeros(5, 1, 16, 16).bfloat16()}, None, "the cache torch"),
    ],
)
def test_what_does_not_fit_is_refused(change, heads, words):
    step = replace(latent_step(1, 6, 12, 4, 16, [(3, 30)]), **change)
    with pytest.raises(ValueError, match=words):
        step.attend(operators(), heads=heads)
