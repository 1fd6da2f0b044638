"""Tests decode attention over quantised caches, which multiplies in float16 for any dtype of q."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import attention_launch
from tests.kernels.gpu.attention_cases import SCALE, Case, decode, paged_case

LENGTHS = (1, 17, 64, 129, 200)
# Way to read a cache → its dtype, and a compute capability that uses this way
KINDS = {
    "int8": (torch.int8, "90"),
    "fp8": (torch.float8_e4m3fn, "90"),
    "fp8_bits": (torch.float8_e4m3fn, "80"),
}


@pytest.fixture(params=KINDS)
def cache_dtype(request, monkeypatch, interpreted) -> torch.dtype:
    """The cache's dtype. Interpreted kernels read it as the given GPU does, others as the GPU at hand."""
    dtype, capability = KINDS[request.param]
    if interpreted:
        monkeypatch.setattr(attention_launch, "architecture", lambda: capability)
    return dtype


def coded(cache_dtype, device, lengths=LENGTHS, dtype=torch.bfloat16, **sizes) -> Case:
    chunks = [(1, n) for n in lengths]
    return paged_case(chunks, dtype=dtype, cache_dtype=cache_dtype, device=device, **sizes)


def scaled(case: Case, k: Tensor | float = 1.0, v: Tensor | float = 1.0) -> Case:
    k_scale, v_scale = case.scales
    return replace(case, scales=(k_scale * k, v_scale * v))


def assert_equals_the_reference(case: Case, within: float, **how) -> None:
    """Compare with the reference: sums as in float32, values within a share of a row's maximum."""
    (out, lse), (wanted, sums) = decode(case, **how), case.reference()
    torch.testing.assert_close(lse, sums, atol=1e-4, rtol=1e-5)
    largest = wanted.float().abs().amax(-1, keepdim=True)
    assert bool(((out.float() - wanted.float()).abs() <= within * largest + 1e-16).all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("segment", [64, 512])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float16, 2e-3), (torch.bfloat16, 8e-3)])
def test_weights_have_the_bits_of_float16(cache_dtype, dtype, within, segment, device) -> None:
    """Bounds are two roundings of the result: 8-bit weights, as in bfloat16, would exceed the first one."""
    assert_equals_the_reference(coded(cache_dtype, device, dtype=dtype), within, segment=segment)


def test_every_quantised_value_is_exact(cache_dtype, device) -> None:
    """A single key with weight 1: its values are returned unchanged, and each query's sum is one quantised
    value."""
    case = coded(cache_dtype, device, [1] * 16, kv_heads=1, group=16, dim=256)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(cache_dtype)
    known = codes.float().isfinite()
    codes = torch.where(known, codes.float(), 0.0).to(cache_dtype)
    for cache in (case.k, case.v):
        cache.view(torch.uint8)[case.table[:, 0].long(), :, 0] = codes.view(torch.uint8)
    case.q[:] = torch.eye(256, device=device).view(16, 16, 256)
    halves = torch.full_like(case.scales[0], 0.5)
    out, lse = decode(replace(case, scales=(halves, halves)))
    assert torch.equal(out.float(), (codes.float() * 0.5).expand(16, 16, 256))
    torch.testing.assert_close(lse.flatten(), codes.float() * 0.5 * SCALE, atol=1e-6, rtol=1e-6)


@pytest.mark.sample(1)
def test_queries_beyond_the_range_of_float16(cache_dtype, device) -> None:
    case = coded(cache_dtype, device)
    for size in (2.0**40, 2.0**-40):
        assert_equals_the_reference(scaled(replace(case, q=case.q * size), 1 / size), 8e-3)


@pytest.mark.sample(1)
def test_scales_of_values_beyond_the_range_of_float16(cache_dtype, device) -> None:
    """One key's scale may be 2^60 times another's, or as small as the scale of zeros."""
    case = coded(cache_dtype, device)
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(-30, 31, case.scales[1].shape, generator=draw).float().exp2().to(device)
    for least in (1.0, 0.0, 1e-38):
        lost = torch.rand(sizes.shape, generator=draw).to(device) < 0.3
        assert_equals_the_reference(scaled(case, v=torch.where(lost, least, sizes)), 8e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("which", [0, 1])
def test_a_scale_that_is_no_number_shows(cache_dtype, which, device) -> None:
    case = coded(cache_dtype, device)
    case.scales[which][case.table[3, 2].long(), 1, 5] = float("nan")
    lost = decode(case)[0].isnan()
    assert lost[3, 2:].all()
    assert int(lost.sum()) == lost[3, 2:].numel()
