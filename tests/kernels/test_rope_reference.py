"""The reference for RoPE compared with complex rotations, and its quantised cache compared with the definition."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.rope_store import (
    quantize_heads_reference,
    rope_reference,
    rope_store_reference,
    rotate_reference,
    store_reference,
)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate x: (T, heads, 2 × pairs) with adjacent pairs, by angles: (T, pairs)."""
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("pairs", [1, 3, 5])
def test_neighbours_turn_as_complex_numbers(pairs):
    x, angles = torch.randn(4, 2, 10), torch.rand(4, pairs) * 6
    got = rotate_reference(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(got[..., : 2 * pairs], rotated(x[..., : 2 * pairs], angles))
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("pairs", [1, 3, 5])
def test_halves_turn_as_neighbours_do(pairs):
    x, angles = torch.randn(4, 2, 10), torch.rand(4, pairs) * 6
    table = angles.cos(), angles.sin()
    order = torch.arange(2 * pairs).reshape(2, pairs).T.flatten()  # from halves to neighbours
    beside = torch.cat((x[..., order], x[..., 2 * pairs :]), -1)
    got = rotate_reference(x, *table)
    wanted = rotate_reference(beside, *table, interleaved=True)
    assert torch.equal(got[..., order], wanted[..., : 2 * pairs])
    assert torch.equal(got[..., 2 * pairs :], wanted[..., 2 * pairs :])


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_q_is_rotated_equally_with_and_without_k_and_v(offset):
    """`offset`: of norms; None: no norms."""
    q, kv, angles = torch.randn(3, 4, 8), torch.randn(2, 3, 2, 8), torch.rand(3, 3) * 6
    caches, norms = torch.zeros(2, 1, 2, 4, 8), torch.randn(2, 8) if offset is not None else [None, None]
    places = (angles.cos(), angles.sin(), *caches, torch.arange(3))
    wanted = rope_store_reference(q, *kv, *places, *norms, offset=offset or 0.0)
    assert torch.equal(rope_reference(q, *places[:2], norms[0], offset=offset or 0.0), wanted)
    with pytest.raises(ValueError, match="rotated in 5 pairs"):
        rope_reference(q, torch.ones(3, 5), torch.ones(3, 5))


def test_each_head_of_a_token_has_a_scale_of_its_own():
    values = torch.tensor(
        [[[1.0, -3.4, 127.0], [0.0, 0.0, 0.0]], [[-2.54, 0.6, 0.01], [1.0, float("nan"), 2.0]]]
    )
    codes, scales = quantize_heads_reference(values, torch.int8)
    assert codes.tolist() == [[[1, -3, 127], [0, 0, 0]], [[-127, 30, 0], [0, 0, 0]]]
    torch.testing.assert_close(scales, torch.tensor([[1.0, 0.0], [0.02, float("nan")]]), equal_nan=True)
    codes, scales = quantize_heads_reference(values[:1] * 448 / 127, torch.float8_e4m3fn)
    assert codes.float().tolist() == [[[3.5, -12.0, 448.0], [0.0, 0.0, 0.0]]]
    assert scales.tolist() == [[1.0, 0.0]]


def test_padding_goes_nowhere():
    cache = torch.zeros(2, 1, 2, 1)
    store_reference(torch.tensor([[[1.0]], [[2.0]], [[3.0]]]), cache, torch.tensor([3, -1, 0]))
    assert cache.flatten().tolist() == [3.0, 0.0, 0.0, 1.0]


def test_what_does_not_fit_is_refused():
    q, slots = torch.zeros(2, 4, 8), torch.arange(2)
    cos, cache = torch.zeros(2, 4), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="rotated in 5 pairs"):
        rope_store_reference(q, q, q, torch.zeros(2, 5), torch.zeros(2, 5), cache, cache, slots)
    with pytest.raises(ValueError, match="has no scale"):
        rope_store_reference(q, q, q, cos, cos, cache.to(torch.int8), cache.to(torch.int8), slots)
    with pytest.raises(ValueError, match="has a scale"):
        rope_store_reference(q, q, q, cos, cos, cache, cache, slots, k_scale=torch.ones(1, 4, 2))
