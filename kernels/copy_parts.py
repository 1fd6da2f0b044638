"""Copies the first tokens of KV blocks, which prompts share beyond whole blocks. Cost: cost.copy_parts_cost."""

from __future__ import annotations

import torch
from torch import Tensor

FIELDS = 4  # of a part: source block, target block, and the offsets [first, end) within both


def check_copy_parts(k_cache: Tensor, v_cache: Tensor, parts: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `copy_parts_reference` accepts."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"caches are {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if parts.dim() != 2 or parts.shape[1] != FIELDS or parts.dtype != torch.int64:
        raise ValueError(f"parts are {tuple(parts.shape)} {parts.dtype}, expected (n, {FIELDS}) int64")


def copy_parts_reference(k_cache: Tensor, v_cache: Tensor, parts: Tensor) -> None:
    """Copy K and V at the offsets [first, end) of one block to the same offsets of another block, in place.

    Args:
        k_cache: (blocks, kv_heads, block_size, D) of any dtype, D values per head.
        v_cache: as k_cache; may be the same tensor.
        parts: (n, 4) int64, one copy per row: source block, target block, first offset, end offset (exclusive). A slot
            that one copy writes must not be read or written by another copy.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_copy_parts(k_cache, v_cache, parts)
    sources, targets, first, end = parts.unbind(1)
    lengths = end - first
    which = torch.repeat_interleave(torch.arange(len(parts), device=parts.device), lengths)
    begins = lengths.cumsum(0) - lengths
    places = torch.arange(len(which), device=parts.device) - begins[which] + first[which]
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets[which], :, places] = cache[sources[which], :, places]
