"""Memory that suits large tensors: in huge pages, and kept once the process has it. Linux and glibc; else as is."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform

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
    # Private, since shared memory has no huge pages
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: all works, slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)  # keeps the mapping alive


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
