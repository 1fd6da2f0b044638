"""A kernel that no GPU runs well, to show that the tests of compiled kernels see it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def crowded_product_kernel(
    a_ptr, b_ptr, out_ptr, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """With M × N = 128 × 256 and four warps a thread has 256 sums, and 255 registers."""
    m, n, i = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        a = tl.load(a_ptr + m[:, None] * k + (start + i)[None, :])
        b = tl.load(b_ptr + (start + i)[:, None] * N + n[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)
