"""Memory that suits large tensors: in huge pages, and kept once the process has it. Linux and glibc; else as is."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform

import torch
from torch import Tensor

LEAST_BYTES = 2 << 20  # a huge page
_MADV_HUGEPAGE = 14
# mallopt's parameters
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20  # the most that glibc takes as threshold of what is mapped by itself
_TRIMMED_BYTES = 1 << 30


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages under a tensor that nothing was written to yet. Only advice: without them all works, slower.

    Walking page tables of 4 KiB pages costs a kernel that reads scattered blocks or streams weights much of its time,
    the more so in a virtual machine.
    """
    size = tensor.numel() * tensor.element_size()
    if platform.system() == "Linux" and size >= LEAST_BYTES:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, but memory is taken, and cleared, when it is first touched: a cache is as large as the longest
    rows could need, and most jobs touch little of it."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    untouched = torch.frombuffer(mapping, dtype=dtype)  # keeps the mapping alive
    return advise_huge_pages(untouched).view(shape)


def keep_freed_memory() -> None:
    """Have malloc reuse what large temporaries free instead of returning it: every step allocates the same sizes
    again, and the kernel would clear their pages each time."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)
