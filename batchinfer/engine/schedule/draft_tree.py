"""Draft trees: proposed tokens with several alternatives per position.

A tree is a list of tokens and the list of their `parents`: the index of each token's predecessor, which comes before
it, or -1 for the sequence's last token. An empty list of parents means a chain: each token follows the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple


class DraftTree(NamedTuple):
    """Tokens that are proposed to follow a sequence, with alternatives. The children of a node have different tokens.

    Attributes:
        tokens: The token of each node. Parents come before their children.
        parents: The index of each node's parent, or -1 for the sequence's last token. Empty for a chain, in which each
            token follows the token before it.
        chances: The probability that each node and its ancestors are accepted, in descending order. Empty if unknown.
        kinds: The kind of each node, by which acceptance is counted. Empty if it is not counted.
    """

    tokens: Seq[int]
    parents: Seq[int] = ()
    chances: Seq[float] = ()
    kinds: Seq[Hashable] = ()

    def first(self, count: int) -> DraftTree:
        """Return the tree that consists of the first `count` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.chances[:count], self.kinds[:count])


def prune(tree: DraftTree, keeps: Callable[[int, int], bool]) -> DraftTree:
    """Return a draft tree without the nodes for which `keeps` returns False, and without their descendants.

    Args:
        tree: The tree. The result has no `chances` and `kinds`.
        keeps: Called with the index of a node and the index of its parent; returns True to keep the node. It is called
            in the order of the nodes, only for nodes whose parent is kept.
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
    """Return `parents`, or an empty list if they describe a chain: each node's parent is the node before it.

    Args:
        parents: The index of each node's parent in a draft tree, or -1 for the sequence's last token.
    """
    return [] if all(parent == at - 1 for at, parent in enumerate(parents)) else list(parents)


def ancestor_bits(parents: Seq[int]) -> list[int]:
    """Return for each node of a draft tree a bit set of the node and its ancestors. Node i has bit number i.

    Args:
        parents: The index of each node's parent, or -1 for the sequence's last token.
    """
    bits = list[int]()
    for at, parent in enumerate(parents):
        bits.append(1 << at | (0 if parent < 0 else bits[parent]))
    return bits


def parents_from_bits(bits: Seq[int]) -> list[int]:
    """Return the index of each node's parent in a draft tree, or -1 for a child of the sequence's last token.

    Args:
        bits: For each node, a bit set of the node and its ancestors, as `ancestor_bits` returns it.
    """
    return [(own & ~(1 << at)).bit_length() - 1 for at, own in enumerate(bits)]


def node_path(parents: Seq[int], node: int) -> list[int]:
    """Return the path to a node of a draft tree: the indices of its ancestors, outermost first, and of the node.

    Args:
        parents: The index of each node's parent, or -1 for the sequence's last token.
        node: The index of the node. -1: the sequence's last token, whose path is empty.
    """
    found = list[int]()
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def find_child(tokens: Seq[int], parents: Seq[int], node: int, token: int) -> int | None:
    """Return the index of a node's child with a given token in a draft tree, or None if there is no such child.

    Args:
        tokens: The token of each node.
        parents: The index of each node's parent, or an empty list for a chain.
        node: The index of the node, or -1 for the sequence's last token.
        token: The token of the child.
    """
    if not parents:
        return node + 1 if node + 1 < len(tokens) and tokens[node + 1] == token else None
    found = (at for at, parent in enumerate(parents) if parent == node and tokens[at] == token)
    return next(found, None)
