"""Memory that suits large tensors: in huge pages, and kept once the process has it. Linux and glibc; else as is."""

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
LINE_BYTES = 64
# mallopt's parameters
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20  # the largest threshold of separate mappings that glibc takes
_TRIMMED_BYTES = 1 << 30


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, but memory is taken, and cleared, when it is first touched: a cache is as large as the longest
    rows could need, and most jobs touch little of it.

    Walking page tables of 4 KiB pages costs a kernel that reads scattered blocks or streams weights some of its time,
    the more so in a virtual machine.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_huge_pages(size), dtype=dtype).view(shape)  # keeps the mapping alive


def _huge_pages(size: int) -> mmap.mmap:
    # Private, since shared memory has no huge pages
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: all works, slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class ReusedPages:
    """Hands out tensors in memory that tensors before them had, where these are gone: a model's layers are alike, and
    to clear new pages takes as long as to fill them."""

    def __init__(self) -> None:
        self._free, self._old, self._keeps = list[mmap.mmap](), list[mmap.mmap](), True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory to be written, on the host; that of small tensors is not used again."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        mapping = self._taken(size) or _huge_pages(-(-size // LEAST_BYTES) * LEAST_BYTES)
        held = np.frombuffer(mapping, np.uint8, size)
        weakref.finalize(held, self._keep, mapping).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def forget(self) -> None:
        """Give back what no tensor has had since this was called last."""
        self._free, self._old = [], self._free

    def close(self) -> None:
        """Give back what no tensor has, and from now on all memory once its tensor is gone."""
        self._keeps = False
        self._free, self._old = [], []

    def _taken(self, size: int) -> mmap.mmap | None:
        """Return the smallest free piece that is large enough and of which not more than half would lie idle."""
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
    """Hands out tensors that lie one after another in huge pages, as many small ones by themselves could not.

    A piece is freed when all its tensors are; a large one has a piece of its own.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """(size,), on a cache line's boundary."""
        taken = -(-size * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        if taken > PIECE_BYTES // 4:
            return zeros_in_huge_pages((size,), dtype)
        if taken > len(self._rest):
            self._rest = zeros_in_huge_pages((PIECE_BYTES,), torch.uint8)
        bytes_, self._rest = self._rest[: size * dtype.itemsize], self._rest[taken:]
        return bytes_.view(dtype)


def keep_freed_memory() -> None:
    """Have malloc reuse what large temporaries free instead of returning it: every step allocates the same sizes
    again, and the kernel would clear their pages each time."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)
