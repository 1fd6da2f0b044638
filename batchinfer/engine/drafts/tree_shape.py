"""The tree of drafts that is the likeliest to be right, where it is known how often each candidate of each place is."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import NamedTuple


class TreeShape(NamedTuple):
    """The nodes of a tree, the likeliest first: so its first nodes are the best tree of so many."""

    parents: list[int]  # -1: the sequence's last token
    depths: list[int]  # from 0 on
    ranks: list[int]  # which candidate of its place each node is, 0 for the likeliest
    chances: list[float]  # that it is right, and its ancestors

    def first(self, count: int) -> TreeShape:
        """Return the best tree of so many nodes."""
        return TreeShape(self.parents[:count], self.depths[:count], self.ranks[:count], self.chances[:count])


def best_shape(rates: Seq[Seq[float]], most: int) -> TreeShape:
    """Return the tree of up to `most` nodes of which the most are expected to be right (Cai et al., 2024, 2.1.2).

    rates: for each place behind the last token, how likely each of its candidates is to be right where the tokens
    before it are. A node is right with the product of those on its path.
    """
    orders = [sorted(range(len(own)), key=own.__getitem__, reverse=True) for own in rates]
    shape, waiting = TreeShape([], [], [], []), list[tuple[float, int, int, int, float]]()

    def put(depth: int, place: int, parent: int, before: float) -> None:
        """Have the candidate at this place of its depth's order wait, behind a node with this chance."""
        if depth < len(rates) and place < len(rates[depth]):
            chance = before * rates[depth][orders[depth][place]]
            heappush(waiting, (-chance, depth, place, parent, before))

    put(0, 0, -1, 1.0)
    while waiting and len(shape.parents) < most:
        negative, depth, place, parent, before = heappop(waiting)
        node = len(shape.parents)
        shape.parents.append(parent)
        shape.depths.append(depth)
        shape.ranks.append(orders[depth][place])
        shape.chances.append(-negative)
        put(depth, place + 1, parent, before)
        put(depth + 1, 0, node, -negative)
    return shape
