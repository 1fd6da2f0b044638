"""Orders prompts: common prefixes together, and the longest prompts first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import ROOT, Ints, PrefixForest
from batchinfer.plan.order.block_hashes import BLOCK

# An output token takes a whole step, a prompt token a part of one (docs/measurements/order.md)
OUTPUT_WEIGHT = 4
# Least number of rows for which prompts are grouped that share less than a block. With fewer rows it costs more than it
# saves, because long rows start late (docs/measurements/order.md).
MANY = 10_000


def efforts(prompts: NDArray[np.integer], outputs: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the effort of each row in tokens, by which rows are ordered."""
    return prompts.astype(np.int64) + OUTPUT_WEIGHT * outputs.astype(np.int64)


def kept_together(forest: PrefixForest) -> PrefixForest:
    """Return the tree with the nodes whose prompts stay together.

    These are nodes that share more whole blocks than their parent, and all nodes below a parent with MANY prompts.
    """
    above = np.append(forest.depth, 0)[forest.parent]  # ROOT (-1) selects the appended 0
    among = np.append(forest.users, len(forest.node_of))[forest.parent]
    return forest.only((forest.depth // BLOCK > above // BLOCK) | (among >= MANY))


def depth_first(forest: PrefixForest, effort: NDArray[np.int64]) -> Ints:
    """Return the position of each prompt in a depth-first walk that takes larger efforts first.

    The effort of a node is that of its largest prompt. Ties go to the earlier item in sorted order.
    """
    order = np.lexsort((forest.firsts, -np.concatenate([effort, forest.largest(effort)]), forest.around))
    return places_in(forest, order)[: len(effort)]


def places_in(forest: PrefixForest, order: NDArray[np.integer]) -> Ints:
    """Return the first position of each prompt and node in a walk that visits the items of each node in this order.

    `order` lists the items (`PrefixForest.around`), grouped by node, in the order of nodes.
    """
    around, prompts = forest.around[order], len(forest.node_of)
    sizes = np.concatenate([np.ones(prompts, np.int32), forest.users])[order]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(around, prepend=ROOT - 1))
    inside = np.empty(len(order), np.int32)  # positions within the parent node
    inside[order] = before - np.repeat(before[begins], np.diff(begins, append=len(order)))
    starts = forest.from_root(inside[prompts:])
    # ROOT (-1) selects the appended 0, the start of the root
    own = inside[:prompts] + np.append(starts, 0)[forest.node_of]
    return np.concatenate([own, starts]).astype(np.int32)
