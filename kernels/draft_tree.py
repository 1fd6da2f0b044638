"""Draft trees: the keys that each query sees, the accepted nodes, and moving their K and V in the cache.

The cost of moves is batchinfer_kernels.cost.copy_parts_cost; the rest is negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.copy_parts import FIELDS, check_copy_parts

MOST_NODES = 32  # nodes of a tree: one bit each
NO_NODE = -1  # fills a path after its last accepted node
NO_PARENT = -2  # parent of an unused place; parent -1 is the last verified token


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The keys that each of T queries sees: all up to a position, and marked ones among the next MOST_NODES.

    The nodes of a tree are consecutive keys. The bits of a query in a tree mark its own node and its ancestors. A query
    outside trees has no bits and sees all keys up to its own position.
    """

    last: NDArray[np.int64]  # (T,)
    bits: NDArray[np.int32]  # (T,): bit i marks the key at last + 1 + i

    @property
    def depths(self) -> NDArray[np.int64]:
        """Return the number of keys after `last` that each query sees, (T,)."""
        each = np.ascontiguousarray(self.bits).view(np.uint8).reshape(-1, 4)
        found: NDArray[np.int64] = np.unpackbits(each, axis=1).sum(1, dtype=np.int64)
        return found

    @property
    def nearby(self) -> NDArray[np.int32]:
        """Return the keys that each query sees among the MOST_NODES keys up to its own, (T,).

        Bit d marks the key at distance d before the query's own key. A query sees all keys further back. The value of a
        query outside trees is -1: it sees all keys.
        """
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
        """Return the mask of the queries [first, end), or None if none of them is in a tree."""
        bits = self.bits[first:end]
        return TreeMask(self.last[first:end], bits) if bits.any() else None

    def seen(self, first: int, end: int, keys: int) -> NDArray[np.bool_]:
        """Return which of the first `keys` keys the queries [first, end) see: (end - first, keys) bool."""
        place = np.arange(keys) - self.last[first:end, None] - 1
        inside = (place >= 0) & (place < MOST_NODES)
        bits = self.bits[first:end, None] >> np.where(inside, place, 0) & 1
        found: NDArray[np.bool_] = (place < 0) | (inside & bits.astype(bool))
        return found


def check_tree_paths(tokens: Tensor, firsts: Tensor, drafts: Tensor, parents: Tensor) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    if tokens.dim() != 1 or firsts.shape != drafts.shape[:1] or drafts.dim() != 2:
        raise ValueError(
            f"tokens are {tuple(tokens.shape)}, firsts {tuple(firsts.shape)}, drafts {tuple(drafts.shape)}"
        )
    if parents.shape != drafts.shape or {tokens.dtype, firsts.dtype, drafts.dtype, parents.dtype} != {
        torch.int64
    }:
        raise ValueError(
            f"parents are {tuple(parents.shape)}, drafts {tuple(drafts.shape)}: expected equal shapes, all int64"
        )


def tree_paths_reference(tokens: Tensor, firsts: Tensor, drafts: Tensor, parents: Tensor) -> Tensor:
    """Return the accepted nodes of each tree in order, padded with NO_NODE: (R, M) int32.

    A node is accepted if its token equals the token sampled after its parent, and its parent is accepted.

    Args:
        tokens: (n,) int64, the token sampled after each row of a step.
        firsts: (R,) int64, the row of each tree's last verified token. The rows of the tree's nodes follow it in order.
        drafts: (R, M) int64, the tokens of the nodes.
        parents: (R, M) int64, the node index of each node's parent.

    Raises:
        ValueError: If shapes or dtypes do not match.
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
    """Raise ValueError if shapes or dtypes do not match."""
    check_copy_parts(k_cache, v_cache, torch.empty(0, FIELDS, dtype=torch.int64))
    if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype != torch.int64:
        raise ValueError(f"moves are {tuple(moves.shape)} {moves.dtype}, expected (n, 2) int64")


def move_slots_reference(k_cache: Tensor, v_cache: Tensor, moves: Tensor) -> None:
    """Copy K and V from some slots to others, in place.

    Args:
        k_cache: (blocks, kv_heads, block_size, D) of any dtype.
        v_cache: as k_cache; may be the same tensor.
        moves: (n, 2) int64, the source and target slot, block * block_size + offset. Moves run in order: no later move
            may read or write a slot that an earlier move writes.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_moves(k_cache, v_cache, moves)
    size = k_cache.shape[2]
    sources, targets = moves.unbind(1)
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets // size, :, targets % size] = cache[sources // size, :, sources % size]
