"""Draft trees for tests of attention."""

from __future__ import annotations

import random

import numpy as np

from batchinfer_kernels.draft_tree import MAX_NODES, TreeMask
from tests.kernels.cpu_steps import Step

Parents = list[int]  # by node; -1: the token before the tree


def random_parents(rng: random.Random, nodes: int) -> Parents:
    return [rng.randrange(-1, at) for at in range(nodes)]


def path(parents: Parents, node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def mask_of(step: Step, trees: list[Parents]) -> TreeMask:
    """Return the mask of chunks whose last tokens are the nodes of trees."""
    last, bits = list[int](), list[int]()
    for (queries, context), parents in zip(step.chunks, trees, strict=True):
        root = context - len(parents) - 1
        before = range(context - queries, root + 1)
        last += [*before, *[root] * len(parents)]
        bits += [0] * len(before) + [
            sum(1 << at for at in path(parents, node)) for node in range(len(parents))
        ]
    return TreeMask(np.array(last), np.array(bits, np.uint32).view(np.int32))


def random_trees(step: Step, seed: int, nodes: int = MAX_NODES) -> list[Parents]:
    rng = random.Random(seed)
    return [random_parents(rng, rng.randint(0, min(nodes, queries - 1))) for queries in step.queries]
