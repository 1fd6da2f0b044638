"""The order in which requests run: a depth-first walk of the prefix tree.

At each node, the prompts and branches with the largest number of tokens come first. Long requests start early, and
requests with a common prefix stay together.
"""

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
    """Return an estimate of the work of each request, in tokens: prompt tokens + OUTPUT_WEIGHT × output tokens.

    Args:
        prompts: Prompt tokens of each request.
        outputs: Expected output tokens of each request.
    """
    return prompts.astype(np.int64) + OUTPUT_WEIGHT * outputs.astype(np.int64)


def kept_together(forest: PrefixForest) -> PrefixForest:
    """Return the prefix tree reduced to the nodes whose prompts must run in direct succession.

    A node is kept if its prefix fills more KV-cache blocks than its parent's prefix, or if its parent has at least MANY
    (10,000) prompts.
    """
    above = np.append(forest.depth, 0)[forest.parent]  # ROOT (-1) selects the appended 0
    among = np.append(forest.users, len(forest.node_of))[forest.parent]
    return forest.only((forest.depth // BLOCK > above // BLOCK) | (among >= MANY))


def depth_first(forest: PrefixForest, effort: NDArray[np.int64]) -> Ints:
    """Return the position of each prompt in a depth-first walk of the prefix tree that visits the largest effort first.

    Prompts with a common prefix stay together, and long requests start early. The effort of a node is the effort of its
    largest prompt. Among equal efforts, the order of the tree is kept.

    Args:
        forest: The prefix tree.
        effort: Effort of each prompt, from `efforts`.
    """
    order = np.lexsort(
        (forest.first_prompts, -np.concatenate([effort, forest.largest(effort)]), forest.parents)
    )
    return places_in(forest, order)[: len(effort)]


def places_in(forest: PrefixForest, order: NDArray[np.integer]) -> Ints:
    """Return the position at which a depth-first walk of the prefix tree reaches each prompt and each node.

    Prompts and nodes are numbered together, as in `PrefixForest.parents`: first all prompts, then all nodes.

    Args:
        forest: The prefix tree.
        order: The numbers of the children of each node, in the order in which the walk visits them. The children of all
            nodes are concatenated, in ascending order of their parent.

    Returns:
        The position of each prompt, then for each node the position of its first prompt.
    """
    parents, prompts = forest.parents[order], len(forest.node_of)
    sizes = np.concatenate([np.ones(prompts, np.int32), forest.users])[order]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(parents, prepend=ROOT - 1))
    inside = np.empty(len(order), np.int32)  # positions within the parent node
    inside[order] = before - np.repeat(before[begins], np.diff(begins, append=len(order)))
    starts = forest.from_root(inside[prompts:])
    # ROOT (-1) selects the appended 0, the start of the root
    own = inside[:prompts] + np.append(starts, 0)[forest.node_of]
    return np.concatenate([own, starts]).astype(np.int32)
