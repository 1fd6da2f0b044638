"""Memory for large tensors: huge pages, and reuse of freed memory. Without Linux or glibc it is ordinary memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform
import weakref

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 2 << 20  # a huge page
PIECE_BYTES = 64 << 20
LINE_BYTES = 64  # a cache line
# Parameters of mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20  # the largest M_MMAP_THRESHOLD that glibc accepts
_TRIMMED_BYTES = 1 << 30


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros, in huge pages if it has at least LEAST_BYTES bytes.

    The system allocates the memory on first access, so a large cache takes little memory until it is filled. Huge pages
    make kernels faster that read scattered blocks or stream weights.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_huge_pages(size), dtype=dtype).view(shape)  # keeps the mapping alive


def _huge_pages(size: int) -> mmap.mmap:
    # Private, because shared memory has no huge pages
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages: correct, but slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class ReusedPages:
    """Allocates tensors in host memory, and reuses the memory of tensors that were freed.

    It is used to load layers of equal sizes: new pages would have to be cleared by the system first, which would double
    the time of filling them.
    """

    def __init__(self) -> None:
        self._free, self._old, self._keeps = list[mmap.mmap](), list[mmap.mmap](), True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in host memory.

        It reuses freed memory of one to two times its size, if there is any. Memory below LEAST_BYTES bytes is not
        reused.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        mapping = self._taken(size) or _huge_pages(-(-size // LEAST_BYTES) * LEAST_BYTES)
        held = np.frombuffer(mapping, np.uint8, size)
        weakref.finalize(held, self._keep, mapping).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def forget(self) -> None:
        """Release the free memory that has not been reused since the previous call of `forget`."""
        self._free, self._old = [], self._free

    def close(self) -> None:
        """Release all free memory. From now on, the memory of a tensor is released when the tensor is freed."""
        self._keeps = False
        self._free, self._old = [], []

    def _taken(self, size: int) -> mmap.mmap | None:
        fitting = [each for each in (*self._free, *self._old) if size <= len(each) <= 2 * size]
        if not fitting:
            return None
        found = min(fitting, key=len)
        (self._free if any(each is found for each in self._free) else self._old).remove(found)
        return found

    def _keep(self, mapping: mmap.mmap) -> None:
        if self._keeps:
            self._free.append(mapping)


class HugePages:
    """Allocates small tensors next to each other in huge pages.

    The memory of a page is freed with the last tensor in it. A large tensor gets its own memory.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (size,), aligned to a cache line."""
        taken = -(-size * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        if taken > PIECE_BYTES // 4:
            return zeros_in_huge_pages((size,), dtype)
        if taken > len(self._rest):
            self._rest = zeros_in_huge_pages((PIECE_BYTES,), torch.uint8)
        bytes_, self._rest = self._rest[: size * dtype.itemsize], self._rest[taken:]
        return bytes_.view(dtype)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory: every step allocates the same sizes, and Linux would clear new pages each time."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)
