"""Parts of KV blocks are copied bit by bit in every layout of the cache, and nothing else is written."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.cost import copy_parts_cost
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.kernels.cpu_cache import laid_out, plain
from tests.kernels.refused import assert_refused

BLOCKS = 12
SHAPES = [(1, 1, 4), (3, 5, 12), (2, 16, 64), (1, 33, 10), (2, 64, 20)]  # heads, block size, D


def some_parts(block_size: int, seed: int) -> list[tuple[int, int, int, int]]:
    """Return copies from the first blocks into the last ones: no slot twice, and some copies of no slots."""
    rng = random.Random(seed)
    parts = []
    for target in range(BLOCKS // 2, BLOCKS):
        borders = sorted(rng.randint(0, block_size) for _ in range(3))
        for first, end in pairwise(borders):
            parts.append((rng.randrange(BLOCKS // 2), target, first, end))
    return parts


def caches(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    found = [torch.randn(BLOCKS, *shape, generator=generator).to(dtype) for _ in range(2)]
    for cache in found:
        cache[BLOCKS // 2 :] = float("nan")  # blocks outside of all parts are unchanged
    return found[0], found[1]


def by_place(cache: torch.Tensor, parts: list[tuple[int, int, int, int]]) -> torch.Tensor:
    wanted = cache.clone()
    for source, target, first, end in parts:
        for place in range(first, end):
            wanted[target, :, place] = cache[source, :, place]
    return wanted


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_slots_of_parts_are_copied(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    parts = some_parts(shape[1], seed=shape[2])
    k, v = caches(shape, dtype)
    wanted = [by_place(cache, parts) for cache in (k, v)]
    rows = torch.tensor(parts)
    compiled = CompiledOperators()
    laid = laid_out(compiled, k, v)
    compiled.copy_parts(*laid, rows)
    for found in ((copy_parts_reference(k, v, rows), k, v)[1:], plain(*laid, *shape[1:])):
        assert all(equal(a.contiguous(), b) for a, b in zip(found, wanted, strict=True))


def test_of_a_cache_of_latents_there_is_one_tensor() -> None:
    latents, _ = caches((1, 16, 24), torch.bfloat16)
    parts = some_parts(16, seed=4)
    wanted = by_place(latents, parts)
    copy_parts_reference(latents, latents, torch.tensor(parts))
    assert equal(latents, wanted)


def test_without_parts_nothing_is_copied() -> None:
    k, v = caches(SHAPES[1], torch.float32)
    before = k.clone()
    copy_parts_reference(k, v, torch.zeros(0, 4, dtype=torch.int64))
    assert equal(k, before)


def test_the_cost_counts_bytes_read_and_written() -> None:
    k, v = caches((2, 16, 20), torch.bfloat16)
    moved = 2 * (k[0, :, :5].nbytes + v[0, :, :5].nbytes)
    assert copy_parts_cost(5, 2, 20, 2).bytes == moved
    assert copy_parts_cost(5, 2, 20, 2, tensors=1).bytes == moved / 2


@pytest.mark.parametrize(
    "parts", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4)]
)
def test_what_does_not_fit_is_refused(parts: torch.Tensor) -> None:
    k, v = caches(SHAPES[2], torch.float32)
    assert_refused("parts are", copy_parts_reference, k, v, parts)
    assert_refused("caches are", copy_parts_reference, k, v[:3], torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="not multiples of the vector size"):
        CompiledOperators().copy_parts(
            *caches((1, 5, 7), torch.float32), torch.zeros(1, 4, dtype=torch.int64)
        )
