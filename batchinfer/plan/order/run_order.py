"""The order in which prompts run: those that share a prefix together, and those that take longest first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import ROOT, Ints, PrefixForest
from batchinfer.plan.order.block_hashes import BLOCK

# What ends last must start first, and an output token takes a step where a prompt token takes a share of one. Sorted by
# outputs alone, though, rows of one cohort read together and answer together, which leaves the device to one of
# the two. Simulated over the scheduler with the operators' declared costs (15 settings each: 128 and 700 rows of
# log-uniform prompts 16…1024 and outputs 8…256; 600 and 1000 rows with one output 20 × the median), seconds against
# the best order of each setting, mean (worst):
#                 shuffled       prompt + output  output         prompt + 2 o.  prompt + 4 o.  prompt + 8 o.
#   135M, CPU     1.007 (1.014)  1.004 (1.013)    1.005 (1.014)  1.003 (1.010)  1.002 (1.006)  1.002 (1.009)
#   8B, one GPU   1.088 (1.177)  1.036 (1.132)    1.017 (1.066)  1.023 (1.096)  1.006 (1.023)  1.005 (1.012)
# A CPU is bound by compute whatever it mixes, so no order gains much there.
OUTPUT_WEIGHT = 4


# Rows among which those stand together that share less than a block. Sharing so little saves little, and rows in groups
# no longer start in the order of their efforts, so that long ones may start last. Simulated as above, 8B on one GPU,
# groups of rows that share their first token, as many as 8 to 200, time against the order by effort alone, worst:
# 128 rows 1.12, 700 rows 1.17, 1,000 rows 1.12, 3,000 rows 1.04, 10,000 rows 1.01. Among fewer rows the engine shares
# such beginnings all the same, as far as they wait in it at the same time.
MANY = 10_000


def efforts(prompts: NDArray[np.integer], outputs: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the two numbers by which rows are compared, both in tokens."""
    return prompts.astype(np.int64) + OUTPUT_WEIGHT * outputs.astype(np.int64)


def kept_together(forest: PrefixForest) -> PrefixForest:
    """The nodes whose prompts are to stand together: those that share more whole blocks than the ones around them, and
    any among MANY prompts."""
    above = np.append(forest.depth, 0)[forest.parent]  # last, where ROOT points
    among = np.append(forest.users, len(forest.node_of))[forest.parent]
    return forest.only((forest.depth // BLOCK > above // BLOCK) | (among >= MANY))


def depth_first(forest: PrefixForest, effort: NDArray[np.int64]) -> Ints:
    """The place of each prompt, all in sorted order: a walk of a forest (`kept_together`), at each node by descending
    effort.

    A node's effort is its largest prompt's. Of equals that come first in sorted order do.
    """
    return walk(forest, effort, forest.largest(effort))


def walk(forest: PrefixForest, values: NDArray[Any], node_values: NDArray[Any]) -> Ints:
    """The place of each prompt in a walk of the forest that takes what lies at a node by descending value."""
    order = np.lexsort((forest.firsts, -np.concatenate([values, node_values]), forest.around))
    return places_in(forest, order)[: len(values)]


def places_in(forest: PrefixForest, order: NDArray[np.integer]) -> Ints:
    """The first place of each prompt, and of each node, in a walk that takes what lies at a node in this order.

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
