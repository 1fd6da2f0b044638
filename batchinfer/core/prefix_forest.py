"""The prefixes that prompts share: a forest, found from how much neighbours in an order have in common.

A node is a prefix that two prompts or more in a row begin with, and behind which they part or one of them ends; its
parent is the longest shorter one. Where prompts are sorted by what they begin with (by their tokens, or by hashes that
stand for them), each prefix is one node.

Two forests of a job are built so: the plan's, over sorted prompts, is what requests could share; the report's, over the
order in which requests went to the engine, is what that order lets them share. They differ as soon as the order is not
a walk of the plan's (docs/measurements/prefixes.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class ForestBuilder:
    """Takes prompts in their order, in any number of batches."""

    _count: int = 0
    _open: list[int] = field(default_factory=lambda: [ROOT])  # from the root to the node at hand
    _depths: list[int] = field(default_factory=lambda: [0])  # theirs
    _depth: array[int] = field(default_factory=lambda: array("i"))
    _first: array[int] = field(default_factory=lambda: array("i"))
    _users: array[int] = field(default_factory=lambda: array("i"))
    _parent: array[int] = field(default_factory=lambda: array("i"))

    def add(self, shared: Iterable[int]) -> None:
        """For each prompt, how many tokens it has in common with the one before it; for the first one 0."""
        for tokens in shared:
            if tokens != self._depths[-1]:
                self._turn(tokens)
            self._count += 1

    def _turn(self, depth: int) -> None:
        """Close what ends before the prompt at hand, and open what begins with the one before."""
        first = self._count - 1
        while depth < self._depths[-1]:
            first = self._close(depth)
        if depth > self._depths[-1]:
            self._begin(depth, first)

    def _close(self, depth: int) -> int:
        """Close the deepest open node; its first prompt. What is next to it lies `depth` deep."""
        node, _ = self._open.pop(), self._depths.pop()
        first = self._first[node]
        self._users[node] = self._count - first
        if self._depths[-1] < depth:
            self._begin(depth, first)
        self._parent[node] = self._open[-1]
        return first

    def _begin(self, depth: int, first: int) -> None:
        self._open.append(len(self._depth))
        self._depths.append(depth)
        for column, value in (
            (self._depth, depth),
            (self._first, first),
            (self._users, 0),
            (self._parent, ROOT),
        ):
            column.append(value)

    def finished(self) -> PrefixForest:
        """The forest of all that was added."""
        self._turn(0)
        columns = (self._depth, self._first, self._users, self._parent)
        depth, first, users, parent = (np.array(column, np.int32) for column in columns)
        order = np.lexsort((depth, first))
        place = np.append(np.empty_like(order), ROOT)  # behind the last, where ROOT points
        place[order] = np.arange(len(order))
        depth, first, users, parent = (
            depth[order],
            first[order],
            users[order],
            place[parent[order]].astype(np.int32),
        )
        node_of = _deepest(first, users, parent, self._count)
        return PrefixForest(depth, first, users, parent, node_of)


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
