"""The order in which prompts run: those that share a prefix together, and those that take longest first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import ROOT, Ints, PrefixForest
from batchinfer.plan.order.block_hashes import BLOCK

# An output token takes a step where a prompt token takes a share of one (docs/measurements/order.md).
OUTPUT_WEIGHT = 4
# Rows among which prompts stand together that share less than a block: among fewer rows it would cost more than it
# saves, because long ones would start late (docs/measurements/order.md).
MANY = 10_000


def efforts(prompts: NDArray[np.integer], outputs: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the efforts by which rows are ordered, in tokens."""
    return prompts.astype(np.int64) + OUTPUT_WEIGHT * outputs.astype(np.int64)


def kept_together(forest: PrefixForest) -> PrefixForest:
    """Return the nodes whose prompts are to stand together: nodes that share more whole blocks than the ones around
    them, and any among MANY prompts."""
    above = np.append(forest.depth, 0)[forest.parent]  # last, where ROOT points
    among = np.append(forest.users, len(forest.node_of))[forest.parent]
    return forest.only((forest.depth // BLOCK > above // BLOCK) | (among >= MANY))


def depth_first(forest: PrefixForest, effort: NDArray[np.int64]) -> Ints:
    """Return the place of each prompt, all in sorted order: a walk of a forest (`kept_together`), at each node by
    descending effort.

    A node's effort is its largest prompt's. Of equals that come first in sorted order do.
    """
    order = np.lexsort((forest.firsts, -np.concatenate([effort, forest.largest(effort)]), forest.around))
    return places_in(forest, order)[: len(effort)]


def places_in(forest: PrefixForest, order: NDArray[np.integer]) -> Ints:
    """Return the first place of each prompt, and of each node, in a walk that takes the items of a node in this order.

    `order`: the items (`PrefixForest.around`), those of each node together, in the order of nodes.
    """
    around, prompts = forest.around[order], len(forest.node_of)
    sizes = np.concatenate([np.ones(prompts, np.int32), forest.users])[order]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(around, prepend=ROOT - 1))
    inside = np.empty(len(order), np.int32)  # places within the node around
    inside[order] = before - np.repeat(before[begins], np.diff(begins, append=len(order)))
    starts = forest.from_root(inside[prompts:])
    own = inside[:prompts] + np.append(starts, 0)[forest.node_of]  # last, where ROOT points, the root's
    return np.concatenate([own, starts]).astype(np.int32)
