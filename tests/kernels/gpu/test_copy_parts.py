"""Compares the kernel that copies partial blocks with its reference."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.gpu.copy_parts import copy_parts
from tests.kernels.test_copy_parts import BLOCKS, SHAPES, equal, some_parts

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, (*DTYPES, torch.float16), strict=True)), ids=str
)
@pytest.mark.parametrize("latent", [False, True])
def test_equals_the_reference(device, shape, dtype, latent):
    """Any bits of quantised values, including NaN."""
    generator = torch.Generator().manual_seed(7)
    values = (BLOCKS, *shape[:2], shape[2] * dtype.itemsize)
    bits = [torch.randint(256, values, generator=generator).to(torch.uint8) for _ in range(2)]
    parts = torch.tensor(some_parts(shape[1], seed=3))
    wanted = [some.clone() for some in bits]
    copy_parts_reference(wanted[0], wanted[0] if latent else wanted[1], parts)
    k, v = (some.to(device).view(dtype) for some in bits)
    copy_parts(k, k if latent else v, parts.to(device))
    assert equal(k.cpu(), wanted[0])
    assert equal(v.cpu(), wanted[1])


def test_no_parts(device):
    cache = torch.ones(2, 1, 4, 8, device=device)
    copy_parts(cache, cache, torch.zeros(0, 4, dtype=torch.int64, device=device))
    assert bool((cache == 1).all())


def test_caches_with_gaps_are_refused():
    cache = torch.zeros(4, 2, 4, 16)[..., ::2]
    with pytest.raises(ValueError, match="contiguous"):
        copy_parts(cache, cache, torch.zeros(1, 4, dtype=torch.int64))
