"""Draft trees: proposed tokens with several alternatives per position.

A tree is a list of tokens and the list of their `parents`: the index of each token's predecessor, which comes before
it, or -1 for the sequence's last token. An empty list of parents means a chain: each token follows the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple


class DraftTree(NamedTuple):
    """Proposed tokens after a sequence. Siblings are different tokens."""

    tokens: Seq[int]
    parents: Seq[int] = ()
    # Probability that each node and its ancestors are accepted, in descending order; empty if unknown
    chances: Seq[float] = ()
    kinds: Seq[Hashable] = ()  # kind of each node, for counting acceptance

    def first(self, count: int) -> DraftTree:
        """Return the tree of the first `count` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.chances[:count], self.kinds[:count])


def prune(tree: DraftTree, keeps: Callable[[int, int], bool]) -> DraftTree:
    """Return the tree without rejected nodes and their descendants.

    Args:
        tree: The tree.
        keeps: Returns True to keep a node, from its index and its parent's. Only called if the parent is kept, in
            order.
    """
    new_index = {-1: -1}  # of the kept nodes
    parents = list[int]()
    for at in range(len(tree.tokens)):
        parent = tree.parents[at] if tree.parents else at - 1
        if parent in new_index and keeps(at, parent):
            new_index[at] = len(parents)
            parents.append(new_index[parent])
    kept = [at for at in new_index if at >= 0]
    tokens = tree.tokens if len(kept) == len(tree.tokens) else [tree.tokens[at] for at in kept]
    return DraftTree(tokens, compact_parents(parents))


def compact_parents(parents: Seq[int]) -> list[int]:
    """Return the parents of a tree, or an empty list if the tree is a chain."""
    return [] if all(parent == at - 1 for at, parent in enumerate(parents)) else list(parents)


def ancestor_bits(parents: Seq[int]) -> list[int]:
    """Return a bit set of each node's ancestors and the node itself: bit i is node i."""
    bits = list[int]()
    for at, parent in enumerate(parents):
        bits.append(1 << at | (0 if parent < 0 else bits[parent]))
    return bits


def parents_from_bits(bits: Seq[int]) -> list[int]:
    """Return the parents of the nodes, from their `ancestor_bits`."""
    return [(own & ~(1 << at)).bit_length() - 1 for at, own in enumerate(bits)]


def node_path(parents: Seq[int], node: int) -> list[int]:
    """Return the path from the root to a node, including the node."""
    found = list[int]()
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def find_child(tokens: Seq[int], parents: Seq[int], node: int, token: int) -> int | None:
    """Return the index of a node's child with this token, or None. Node -1 is the sequence's last token."""
    if not parents:
        return node + 1 if node + 1 < len(tokens) and tokens[node + 1] == token else None
    found = (at for at, parent in enumerate(parents) if parent == node and tokens[at] == token)
    return next(found, None)
