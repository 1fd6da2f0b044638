"""Finds the nodes of trees of drafts that are right, by the tokens that were sampled behind each. Cost: none worth
counting."""

from __future__ import annotations

import torch
from torch import Tensor

NO_NODE = -1  # behind the last right one
NO_PARENT = -2  # of places that have no node; -1: the last token that is known


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
