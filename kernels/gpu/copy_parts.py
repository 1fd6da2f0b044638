"""Copies the first tokens of KV blocks. Cost: batchinfer_kernels.cost.copy_parts_cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.copy_parts import FIELDS, check_copy_parts

# Values that a program copies at a time: 16 bytes of bfloat16 per thread with 4 warps
TILE = 1024
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # values are copied as integers


@triton.jit(do_not_specialize=["heads"])
def _copy_parts_kernel(
    k_ptr, v_ptr, parts_ptr, heads, block_size, FIELDS: tl.constexpr, D: tl.constexpr, BOTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    parts_ptr += tl.program_id(0).to(tl.int64) * FIELDS
    source, target = tl.load(parts_ptr), tl.load(parts_ptr + 1)
    first, end = tl.load(parts_ptr + 2) * D, tl.load(parts_ptr + 3) * D
    head, size = tl.program_id(1), block_size.to(tl.int64) * D
    read, written = (source * heads + head) * size, (target * heads + head) * size
    for start in range(first, end, TILE):
        at = start + tl.arange(0, TILE)
        mask = at < end
        tl.store(k_ptr + written + at, tl.load(k_ptr + read + at, mask=mask), mask=mask)
        if BOTH:
            tl.store(v_ptr + written + at, tl.load(v_ptr + read + at, mask=mask), mask=mask)


def copy_parts(k_cache: Tensor, v_cache: Tensor, parts: Tensor) -> None:
    """Copy K and V at the offsets [first, end) of one block to the same offsets of another block, in place.

    Args:
        k_cache: (blocks, kv_heads, block_size, D), contiguous, of any dtype.
        v_cache: as k_cache; may be the same tensor.
        parts: (n, 4) int64, contiguous, one copy per row: source block, target block, first offset, end offset.
    """
    check_copy_parts(k_cache, v_cache, parts)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and parts.is_contiguous()):
        raise ValueError("caches and parts must be contiguous")
    _, heads, block_size, dim = k_cache.shape
    k, v = (cache.view(_INTEGERS[cache.element_size()]) for cache in (k_cache, v_cache))
    if len(parts):
        _copy_parts_kernel[(len(parts), heads)](
            k, v, parts, heads, block_size, FIELDS=FIELDS, D=dim, BOTH=v_cache is not k_cache, TILE=TILE,
            num_warps=4,
        )  # fmt: skip
