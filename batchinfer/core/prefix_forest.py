"""The prefixes that prompts share: a forest, found from how much neighbours in an order have in common.

A node is a prefix that two prompts or more in a row begin with, and behind which they part or one of them ends; its
parent is the longest shorter one. Where prompts are sorted by what they begin with (by their tokens, or by hashes that
stand for them), each prefix is one node.

Two forests of a job are built so: the plan's, over sorted prompts, is what requests could share; the report's, over the
order in which requests went to the engine, is what that order lets them share. They differ as soon as the order is not
a walk of the plan's (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
ROOT = -1  # the parent of what shares nothing: no node


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """The nodes, parents before children; a node has the prompts [first, first + users) in the order given."""

    depth: Ints  # tokens
    first: Ints
    users: Ints
    parent: Ints  # number of a node, or ROOT
    node_of: Ints  # by prompt: the deepest node that it belongs to, or ROOT

    def __len__(self) -> int:
        return len(self.depth)

    @property
    def around(self) -> Ints:
        """The node of each item, which are the prompts, then the nodes: the deepest one around it, or ROOT."""
        return np.concatenate([self.node_of, self.parent])

    @property
    def firsts(self) -> Ints:
        """The first prompt of each item."""
        return np.concatenate([np.arange(len(self.node_of), dtype=np.int32), self.first])

    @property
    def own(self) -> Ints:
        """Tokens of each node behind those of its parent."""
        return self.depth - np.where(self.parent == ROOT, 0, self.depth[self.parent]).astype(np.int32)

    @property
    def saved(self) -> NDArray[np.int64]:
        """Prompt tokens that each node saves where it runs once: its own tokens for every user but the first."""
        return self.own.astype(np.int64) * (self.users - 1)

    def only(self, kept: NDArray[np.bool_]) -> PrefixForest:
        """The forest without the other nodes: what lay at one of them lies at the next one above that is kept."""
        above = np.append(np.where(kept, np.arange(len(self)), self.parent), ROOT)  # last, where ROOT points
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
        """Sum values over each node and all above it, in as many rounds as the logarithm of the forest's height."""
        sums, above = np.append(values, values.dtype.type(0)), np.append(self.parent, np.int32(ROOT))
        while (above != ROOT).any():
            sums, above = sums + sums[above], above[above]
        return sums[:-1]

    def largest(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return for each node the largest of its prompts' values, which are given in the same order."""
        ends = np.stack([self.first, self.first + self.users], 1).ravel()
        behind = np.append(values.astype(np.int64), 0)  # where the last prompt's node may end
        return np.maximum.reduceat(behind, ends)[::2] if len(self) else np.zeros(0, np.int64)


def prefix_forest(shared: Ints) -> PrefixForest:
    """Return the forest of prompts of which each has so many tokens in common with the one before it; the first one 0.

    A node is a stretch of prompts none of which shares less with the one before it than the node is deep. Its borders
    are where the nearest smaller numbers are, which are found for all numbers at once.
    """
    if not len(shared):
        return PrefixForest(*(np.zeros(0, np.int32) for _ in range(5)))
    shared = np.append(shared, np.int32(0))  # behind the last prompt all nodes end
    turns = np.flatnonzero(np.diff(shared, prepend=ROOT)).astype(np.int32)
    depth = np.append(shared[turns], np.int32(ROOT))  # the last one is less deep than all
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
    """Return for each number but the last, which is less than all, the place of the nearest smaller one before it, or
    ROOT. Who knows one that is not smaller goes on to the one that this one knows: nothing between them is smaller."""
    found = np.arange(ROOT, len(depth) - 2, dtype=np.int32)
    seeking = np.arange(len(found), dtype=np.int32)
    while len(seeking := seeking[depth[found[seeking]] >= depth[seeking]]):
        found[seeking] = found[found[seeking]]
    return found


def _in_order(begins: Ints, depth: Ints) -> NDArray[np.int64]:
    """Return the places of what is deeper than nothing: by where it begins, then by depth. Those of a node come
    together."""
    inner = np.flatnonzero(depth > 0)
    return inner[np.argsort(begins[inner].astype(np.int64) << 32 | depth[inner])]


def _deepest(first: Ints, users: Ints, parent: Ints, count: int) -> Ints:
    """Return the deepest node around each prompt: the one that the last border before it left, where nodes begin or
    end."""
    unset = ROOT - 1
    found = np.full(count + 1, unset, np.int32)
    found[0] = ROOT
    # of nodes that end together the outermost comes last, and stays
    found[(first + users)[::-1]] = parent[::-1]
    found[first] = np.arange(len(first))  # of nodes that begin together the deepest
    set_at = np.maximum.accumulate(np.where(found == unset, 0, np.arange(count + 1)))
    return found[set_at][:count]
