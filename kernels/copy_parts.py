"""Copies the beginnings of KV blocks: what two prompts share beyond whole blocks. Cost:
batchinfer_kernels.cost.copy_parts_cost."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a part: the block that is read, the one that is written, and the places [first, end) within both
FIELDS = 4


def check_copy_parts(k_cache: Tensor, v_cache: Tensor, parts: Tensor) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"caches are {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if parts.dim() != 2 or parts.shape[1] != FIELDS or parts.dtype != torch.int64:
        raise ValueError(f"parts are {tuple(parts.shape)} {parts.dtype}, expected (n, {FIELDS}) int64")


def copy_parts_reference(k_cache: Tensor, v_cache: Tensor, parts: Tensor) -> None:
    """Copy K and V of the places [first, end) of one block into the same places of another, in place.

    Caches: (blocks, kv_heads, block_size, D), of any dtype; both may be one tensor. parts: (n, FIELDS) int64; no place
    that one of them writes is read or written by another. Raises ValueError when shapes or dtypes do not fit.
    """
    check_copy_parts(k_cache, v_cache, parts)
    sources, targets, first, end = parts.unbind(1)
    lengths = end - first
    which = torch.repeat_interleave(torch.arange(len(parts), device=parts.device), lengths)
    begins = lengths.cumsum(0) - lengths
    places = torch.arange(len(which), device=parts.device) - begins[which] + first[which]
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets[which], :, places] = cache[sources[which], :, places]
