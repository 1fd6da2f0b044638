"""The forest of prefixes that consecutive prompts share, built from the lengths of their common prefixes.

A node is a prefix of two or more consecutive prompts that diverge, or end, after it. Its parent is the longest shorter
such prefix. If the prompts are sorted, every shared prefix is exactly one node.

The planner builds the forest of sorted prompts: what requests could share. The report builds the forest in the order in
which requests were sent to the engine: the sharing that this order allows (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
ROOT = -1  # the parent of top-level nodes; not a node itself


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """A forest of the prefixes that consecutive prompts share.

    Each node is a prefix that at least two consecutive prompts share. All arrays except `node_of` have an element per
    node. Parents come before children.

    Args:
        depth: The number of tokens of the prefix.
        first: The number of the first prompt with the prefix.
        users: The number of prompts with the prefix. They are the prompts [first, first + users).
        parent: The node of the longest shorter prefix, or ROOT.
        node_of: For each prompt, the node of its longest shared prefix, or ROOT.
    """

    depth: Ints
    first: Ints
    users: Ints
    parent: Ints
    node_of: Ints

    def __len__(self) -> int:
        return len(self.depth)

    @property
    def parents(self) -> Ints:
        """Return (prompts + nodes,): the node of each prompt's longest shared prefix, then the parent of each node.

        Prompts and nodes without one have ROOT.
        """
        return np.concatenate([self.node_of, self.parent])

    @property
    def first_prompts(self) -> Ints:
        """Return (prompts + nodes,): the number of each prompt, then the number of the first prompt of each node."""
        return np.concatenate([np.arange(len(self.node_of), dtype=np.int32), self.first])

    @property
    def own(self) -> Ints:
        """Return for each node of the forest the number of tokens that its prefix has beyond its parent's prefix."""
        return self.depth - np.where(self.parent == ROOT, 0, self.depth[self.parent]).astype(np.int32)

    @property
    def saved(self) -> NDArray[np.int64]:
        """Return for each node of the forest the number of prompt tokens that are saved if it is computed only once.

        These are the node's own tokens (see `own`), for each prompt with its prefix except one.
        """
        return self.own.astype(np.int64) * (self.users - 1)

    def only(self, kept: NDArray[np.bool_]) -> PrefixForest:
        """Return a forest with some of the nodes of this one.

        Children and prompts of a removed node move to its nearest ancestor that is kept.

        Args:
            kept: (nodes,), True for nodes to keep.
        """
        # Index -1 (ROOT) is the last
        above = np.append(np.where(kept, np.arange(len(self)), self.parent), ROOT)
        while (above[above] != above).any():
            above = above[above]
        number = np.append(np.cumsum(kept) - 1, ROOT).astype(np.int32)[above]
        return PrefixForest(
            self.depth[kept],
            self.first[kept],
            self.users[kept],
            number[self.parent[kept]],
            number[self.node_of],
        )

    def from_root(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return for each node of the forest the sum of the values of the node and of all its ancestors.

        Args:
            values: (nodes,), a value for each node.
        """
        sums, above = np.append(values, values.dtype.type(0)), np.append(self.parent, np.int32(ROOT))
        while (above != ROOT).any():
            sums, above = sums + sums[above], above[above]
        return sums[:-1]

    def largest(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return for each node of the forest the largest value among the prompts that have its prefix.

        Args:
            values: (prompts,), a value for each prompt.
        """
        ends = np.stack([self.first, self.first + self.users], 1).ravel()
        padded = np.append(values.astype(np.int64), 0)  # reduceat needs an index for the end of the last node
        return np.maximum.reduceat(padded, ends)[::2] if len(self) else np.zeros(0, np.int64)


def prefix_forest(shared: Ints) -> PrefixForest:
    """Build the forest of the prefixes that consecutive prompts share.

    Args:
        shared: (prompts,), the number of leading tokens that each prompt shares with the previous prompt; 0 for the
            first.
    """
    if not len(shared):
        return PrefixForest(*(np.zeros(0, np.int32) for _ in range(5)))
    shared = np.append(shared, np.int32(0))  # all nodes end after the last prompt
    turns = np.flatnonzero(np.diff(shared, prepend=ROOT)).astype(np.int32)
    depth = np.append(shared[turns], np.int32(ROOT))  # a sentinel smaller than all
    begins = _less_before(depth)
    ends = len(turns) - 1 - _less_before(np.append(depth[-2::-1], np.int32(ROOT)))[::-1]
    order = _in_order(begins[:-1], depth[:-1])
    begin, deep = begins[order], depth[order]
    is_new = np.append(True, (begin[1:] != begin[:-1]) | (deep[1:] != deep[:-1]))[: len(order)]
    number = np.full(len(depth), ROOT, np.int32)
    number[order] = np.cumsum(is_new) - 1
    begin, end = begin[is_new], ends[order[is_new]]
    first = turns[begin + 1] - 1
    users = turns[end] - first
    parent = number[np.where(depth[begin] >= depth[end], begin, end)]
    node_of = _deepest(first, users, parent, len(shared) - 1)
    return PrefixForest(deep[is_new], first, users, parent, node_of)


def _less_before(depth: Ints) -> Ints:
    # The nearest smaller value before each value except the last, or ROOT. If a candidate is not smaller, the next
    # candidate is its own nearest smaller value: none between them is smaller
    found = np.arange(ROOT, len(depth) - 2, dtype=np.int32)
    seeking = np.arange(len(found), dtype=np.int32)
    while len(seeking := seeking[depth[found[seeking]] >= depth[seeking]]):
        found[seeking] = found[found[seeking]]
    return found


def _in_order(begins: Ints, depth: Ints) -> NDArray[np.int64]:
    inner = np.flatnonzero(depth > 0)
    return inner[np.argsort(begins[inner].astype(np.int64) << 32 | depth[inner])]


def _deepest(first: Ints, users: Ints, parent: Ints, count: int) -> Ints:
    # The node changes only where nodes begin or end. A prompt has the node of the last such border before it
    unset = ROOT - 1
    found = np.full(count + 1, unset, np.int32)
    found[0] = ROOT
    # Of nodes that end together, the outermost is written last
    found[(first + users)[::-1]] = parent[::-1]
    found[first] = np.arange(len(first))  # of nodes that begin together, the deepest is written last
    set_at = np.maximum.accumulate(np.where(found == unset, 0, np.arange(count + 1)))
    return found[set_at][:count]
