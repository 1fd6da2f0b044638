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

MAX_NODES = 32  # nodes of a tree: one bit each
NO_NODE = -1  # fills a path after its last accepted node
NO_PARENT = -2  # parent of an unused place; parent -1 is the last verified token


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The keys of its sequence that each of T queries sees, in a step with draft trees.

    The nodes of a draft tree are consecutive keys after the last verified token. The query of a node sees all keys up
    to the last verified token, its ancestors and its own key. A query outside trees sees all keys up to its own.

    Attributes:
        last: (T,) the query sees all keys up to this position.
        bits: (T,) bit i is 1 if the query also sees the key at position last + 1 + i; 0 outside trees.
    """

    last: NDArray[np.int64]
    bits: NDArray[np.int32]

    @property
    def depths(self) -> NDArray[np.int64]:
        """Return for each query the number of keys that it sees after `last`: its depth in the draft tree, (T,)."""
        each = np.ascontiguousarray(self.bits).view(np.uint8).reshape(-1, 4)
        found: NDArray[np.int64] = np.unpackbits(each, axis=1).sum(1, dtype=np.int64)
        return found

    @property
    def nearby(self) -> NDArray[np.int32]:
        """Return which of the nearest MAX_NODES keys each query sees, as bits: (T,) int32.

        Bit d is 1 if the query sees the key d positions before its own; bit 0 is its own key. Queries see all keys
        that are further back. A query outside trees has the value -1: all bits are 1.
        """
        places = np.arange(MAX_NODES)
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
        """Return for each of the queries [first, end) which of the first `keys` keys of its sequence it sees.

        Returns:
            (end - first, keys), True if the query sees the key.
        """
        place = np.arange(keys) - self.last[first:end, None] - 1
        inside = (place >= 0) & (place < MAX_NODES)
        bits = self.bits[first:end, None] >> np.where(inside, place, 0) & 1
        found: NDArray[np.bool_] = (place < 0) | (inside & bits.astype(bool))
        return found


def check_tree_paths(tokens: Tensor, firsts: Tensor, drafts: Tensor, parents: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `tree_paths_reference` accepts."""
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
    """Return the accepted nodes of each of R draft trees, in order from the root, padded with NO_NODE: (R, M) int32.

    A node is accepted if its parent is accepted and its token equals the token sampled after its parent. The root of a
    tree is the last verified token, which is not a node itself.

    Args:
        tokens: (n,) int64, the token sampled after each row of a step.
        firsts: (R,) int64, the row of each tree's last verified token. The rows of its M nodes follow in order.
        drafts: (R, M) int64, the tokens of the nodes.
        parents: (R, M) int64, the index of each node's parent within its tree; -1 for the last verified token,
            NO_PARENT for an unused node.

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
    """Raise ValueError unless the tensors have the shapes and dtypes that `move_slots_reference` accepts."""
    check_copy_parts(k_cache, v_cache, torch.empty(0, FIELDS, dtype=torch.int64))
    if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype != torch.int64:
        raise ValueError(f"moves are {tuple(moves.shape)} {moves.dtype}, expected (n, 2) int64")


def move_slots_reference(k_cache: Tensor, v_cache: Tensor, moves: Tensor) -> None:
    """Copy the K and V of some slots of the cache to other slots, in place.

    Args:
        k_cache: (blocks, kv_heads, block_size, D) of any dtype, D values per head.
        v_cache: as k_cache; may be the same tensor.
        moves: (n, 2) int64, source and target slot, each block * block_size + offset. Moves run in order: no later move
            may read or write a slot that an earlier move writes.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_moves(k_cache, v_cache, moves)
    size = k_cache.shape[2]
    sources, targets = moves.unbind(1)
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets // size, :, targets % size] = cache[sources // size, :, sources % size]
