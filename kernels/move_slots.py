"""Moves tokens within the KV cache: those of a tree of drafts that were right, behind one another. Cost: that of
batchinfer_kernels.cost.copy_parts_cost."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.copy_parts import FIELDS, check_copy_parts


def check_moves(k_cache: Tensor, v_cache: Tensor, moves: Tensor) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    check_copy_parts(k_cache, v_cache, torch.empty(0, FIELDS, dtype=torch.int64))
    if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype != torch.int64:
        raise ValueError(f"moves are {tuple(moves.shape)} {moves.dtype}, expected (n, 2) int64")


def move_slots_reference(k_cache: Tensor, v_cache: Tensor, moves: Tensor) -> None:
    """Copy K and V of some slots to others, in place, one after the other: a slot that one of them writes is read by
    none behind it, and written once.

    Caches: (blocks, kv_heads, block_size, D), of any dtype; both may be one tensor. moves: (n, 2) int64, the slot that
    is read and the one that is written, block * block_size + offset. Raises ValueError when shapes or dtypes do not
    fit.
    """
    check_moves(k_cache, v_cache, moves)
    size = k_cache.shape[2]
    sources, targets = moves.unbind(1)
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets // size, :, targets % size] = cache[sources // size, :, sources % size]
