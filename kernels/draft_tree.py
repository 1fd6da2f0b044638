"""Trees of drafts: the keys that their queries see, the nodes that are right, and the moves of these in the KV cache.

Cost: that of batchinfer_kernels.cost.copy_parts_cost for moves; else none worth counting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.copy_parts import FIELDS, check_copy_parts

MOST_NODES = 32  # of a tree: a bit for each
NO_NODE = -1  # behind the last right one
NO_PARENT = -2  # of places that have no node; -1: the last token that is known


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The keys that each of T queries sees: all up to a position, and of the MOST_NODES behind it those whose bits are
    set. The keys of a tree lie one behind the other, in the order of its nodes, whose bits are its ancestors' and its
    own; other queries have no bits, and see all up to their own positions."""

    last: NDArray[np.int64]  # (T,)
    bits: NDArray[np.int32]  # (T,): bit i stands for the key at last + 1 + i

    @property
    def depths(self) -> NDArray[np.int64]:
        """Count the keys behind `last` that each query sees, (T,)."""
        each = np.ascontiguousarray(self.bits).view(np.uint8).reshape(-1, 4)
        found: NDArray[np.int64] = np.unpackbits(each, axis=1).sum(1, dtype=np.int64)
        return found

    @property
    def nearby(self) -> NDArray[np.int32]:
        """Return which keys each query sees that stand little before it, (T,): bit d of those that are d before its own
        one. It sees all that stand further before it; a query in no tree all, -1."""
        places = np.arange(MOST_NODES)
        ones = (self.bits.view(np.uint32)[:, None] >> places & 1).astype(bool)
        own = np.where(ones, places, -1).max(1, initial=-1)
        before = own[:, None] - places
        seen = (before < 0) | np.take_along_axis(ones, np.maximum(before, 0), 1)
        words: NDArray[np.uint32] = (seen.astype(np.uint32) << places.astype(np.uint32)).sum(
            1, dtype=np.uint32
        )
        return words.view(np.int32)

    def part(self, first: int, end: int) -> TreeMask | None:
        """Return that of the queries [first, end); None: none of them is in a tree."""
        bits = self.bits[first:end]
        return TreeMask(self.last[first:end], bits) if bits.any() else None

    def seen(self, first: int, end: int, keys: int) -> NDArray[np.bool_]:
        """Return which of the first `keys` keys the queries [first, end) see: (end - first, keys)."""
        place = np.arange(keys) - self.last[first:end, None] - 1
        inside = (place >= 0) & (place < MOST_NODES)
        bits = self.bits[first:end, None] >> np.where(inside, place, 0) & 1
        found: NDArray[np.bool_] = (place < 0) | (inside & bits.astype(bool))
        return found


def check_tree_paths(tokens: Tensor, firsts: Tensor, drafts: Tensor, parents: Tensor) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if tokens.dim() != 1 or firsts.shape != drafts.shape[:1] or drafts.dim() != 2:
        raise ValueError(
            f"tokens are {tuple(tokens.shape)}, of trees {tuple(firsts.shape)} {tuple(drafts.shape)}"
        )
    if parents.shape != drafts.shape or {tokens.dtype, firsts.dtype, drafts.dtype, parents.dtype} != {
        torch.int64
    }:
        raise ValueError(f"parents are {tuple(parents.shape)}, of drafts {tuple(drafts.shape)}: all int64")


def tree_paths_reference(tokens: Tensor, firsts: Tensor, drafts: Tensor, parents: Tensor) -> Tensor:
    """Return the right nodes of each tree, one behind the other, and NO_NODE behind them: (R, M) int32.

    tokens: (n,) int64, sampled behind rows of a step. firsts: (R,) int64: the row behind each tree's last known token;
    behind it lie those behind its nodes, in order. drafts: (R, M) int64, the nodes' tokens; parents: (R, M) int64,
    their parents' places. A node is right if it is the token that was sampled behind its parent, and that is right.
    Raises ValueError when shapes or dtypes do not fit.
    """
    check_tree_paths(tokens, firsts, drafts, parents)
    paths = torch.full(drafts.shape, NO_NODE, dtype=torch.int32)
    for tree, first in enumerate(firsts.tolist()):
        node: int | None = -1
        for depth in range(drafts.shape[1]):
            said = int(tokens[first + 1 + node])
            children = (parents[tree] == node) & (drafts[tree] == said)
            if not children.any():
                break
            node = paths[tree, depth] = int(children.nonzero()[0])
    return paths


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
