"""Tests memory for weights and caches: zeroed, aligned, disjoint, and released."""

from __future__ import annotations

import gc
import mmap
import platform
from pathlib import Path

import pytest
import torch

from batchinfer_kernels.cpu.memory import (
    LEAST_BYTES,
    LINE_BYTES,
    PIECE_BYTES,
    HugePages,
    ReusedPages,
    zeros_in_huge_pages,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (LEAST_BYTES // 4, 3)])
def test_zeros(shape, dtype):
    found = zeros_in_huge_pages(shape, dtype)
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert not found.any()


def test_tensors_do_not_overlap():
    pages = HugePages()
    sizes = [1, 0, 63, 64, 65, 5000, PIECE_BYTES // 8, PIECE_BYTES // 8, PIECE_BYTES // 2, 17] * 2
    given = [pages.zeros(size, torch.bfloat16) for size in sizes]
    for number, tensor in enumerate(given):
        assert (tensor.shape, tensor.data_ptr() % LINE_BYTES) == ((sizes[number],), 0)
        assert not tensor.any()
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(given))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(platform.system() != "Linux", reason="/proc is Linux's")
def test_memory_is_taken_when_used_and_given_back():
    before, size = resident(), 64 << 20
    cache = zeros_in_huge_pages((size,), torch.int8)
    assert resident() - before < size // 8
    cache.fill_(1)
    assert resident() - before > size // 2
    del cache
    gc.collect()
    assert resident() - before < size // 8


def test_memory_is_reused_only_after_its_tensor_is_freed():
    pages = ReusedPages()
    first = pages.empty((LEAST_BYTES, 3), torch.bfloat16)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((LEAST_BYTES, 3), torch.bfloat16, True)
    at, view = first.data_ptr(), first[5:].flatten()[7:]
    del first
    other = pages.empty((LEAST_BYTES, 3), torch.bfloat16)
    assert other.data_ptr() != at  # a view of it is left
    del view
    again = pages.empty((LEAST_BYTES, 5), torch.uint8)  # less, but at least half of it
    assert again.data_ptr() == at
    assert pages.empty((LEAST_BYTES,), torch.uint8).data_ptr() != at
    del again
    pages.forget()
    assert pages.empty((LEAST_BYTES, 3), torch.bfloat16).data_ptr() == at


def test_memory_that_waits_is_given_back():
    pages, size = ReusedPages(), 64 << 20
    before = resident()
    for give_back in (lambda: (pages.forget(), pages.forget()), pages.close):
        pages.empty((size,), torch.uint8).fill_(1)
        assert resident() - before > size // 2
        give_back()
        assert resident() - before < size // 8
    pages.empty((size,), torch.uint8).fill_(1)
    assert resident() - before < size // 8
