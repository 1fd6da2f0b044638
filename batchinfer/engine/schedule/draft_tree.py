"""Trees of drafts: tokens that may follow a sequence, each behind another one or behind the sequence's last token.

A tree is its tokens and their `parents`: of each token the place of the one before it, which comes first, or -1 for the
sequence's last token. No parents at all: each token follows the one before, a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple


class DraftTree(NamedTuple):
    """Tokens that may follow a sequence. Those behind the same token differ from one another."""

    tokens: Seq[int]
    parents: Seq[int] = ()
    # How likely each of them is to be right, none likelier than its parent or than one before it; (): nobody knows
    chances: Seq[float] = ()
    kinds: Seq[Hashable] = ()  # of each, the kind of proposals of which it is counted how many are right

    def first(self, count: int) -> DraftTree:
        """Return the first tokens alone."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.chances[:count], self.kinds[:count])


def pruned(tree: DraftTree, keeps: Callable[[int, int], bool]) -> DraftTree:
    """Return the tree without the nodes that are not kept, and those behind them. keeps(node, parent) is asked of each
    node whose parent is kept, in order."""
    places = {-1: -1}  # of those that are kept, where they stand then
    parents = list[int]()
    for at in range(len(tree.tokens)):
        parent = tree.parents[at] if tree.parents else at - 1
        if parent in places and keeps(at, parent):
            places[at] = len(parents)
            parents.append(places[parent])
    kept = [at for at in places if at >= 0]
    tokens = tree.tokens if len(kept) == len(tree.tokens) else [tree.tokens[at] for at in kept]
    return DraftTree(tokens, without_chain(parents))


def without_chain(parents: Seq[int]) -> list[int]:
    """Return the parents, none for those of a chain."""
    return [] if all(parent == at - 1 for at, parent in enumerate(parents)) else list(parents)


def node_bits(parents: Seq[int]) -> list[int]:
    """Return the ancestors of each node, and itself, as bits of their places."""
    bits = list[int]()
    for at, parent in enumerate(parents):
        bits.append(1 << at | (0 if parent < 0 else bits[parent]))
    return bits


def parents_of(bits: Seq[int]) -> list[int]:
    """Return the parents of nodes of which these are the `node_bits`."""
    return [(own & ~(1 << at)).bit_length() - 1 for at, own in enumerate(bits)]


def node_path(parents: Seq[int], node: int) -> list[int]:
    """Return the nodes of the path to a node, that included."""
    found = list[int]()
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def child_with(tokens: Seq[int], parents: Seq[int], node: int, token: int) -> int | None:
    """Return the child of a node, -1 for the sequence's last token, that has this token; None: there is none."""
    if not parents:
        return node + 1 if node + 1 < len(tokens) and tokens[node + 1] == token else None
    found = (at for at, parent in enumerate(parents) if parent == node and tokens[at] == token)
    return next(found, None)
