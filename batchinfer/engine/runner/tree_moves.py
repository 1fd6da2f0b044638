"""Moves the right nodes of a step's trees behind the text, on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.schedule.step_plan import Longs
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.staging import upload
from batchinfer_kernels.draft_tree import NO_PARENT

LEAST_PLACES = 8  # more than a row's drafts in a graph: so there is one width, for which kernels are compiled


class StepTrees(NamedTuple):
    """R trees of up to M nodes; places without a node have the parent NO_PARENT."""

    firsts: Longs  # (R,): the row behind each one's last known token, of the rows that get tokens
    rows: Longs  # (R,): the same row, of all rows that are sampled
    drafts: Longs  # (R, M)
    parents: Longs  # (R, M): places of nodes, -1 for the last known token
    slots: list[Longs]  # of each cache group, (R, M): where K and V of the nodes lie

    @classmethod
    def of(cls, host: HostBatch) -> StepTrees:
        """Read them of a step that has some."""
        assert host.tree is not None, "it has none"
        ends = np.array([*accumulate(host.query_lens)])
        nodes = np.concatenate([[0], np.cumsum(host.tree.bits != 0)])
        counts = nodes[ends] - nodes[ends - np.array(host.query_lens)]
        ends, counts = ends[counts > 0], counts[counts > 0]
        places = np.arange(max(LEAST_PLACES, 1 << (int(counts.max()) - 1).bit_length()))
        inside = places < counts[:, None]
        tokens = np.where(inside, (ends - counts)[:, None] + places, 0)
        sampled = host.sampled_rows
        chosen = sampled if host.sampling.chosen is None else sampled[host.sampling.chosen]
        before = ends - counts - 1
        return cls(
            np.searchsorted(chosen, before),
            np.searchsorted(sampled, before),
            np.where(inside, host.token_ids[tokens], -1),
            np.where(inside, _parents(host.tree.bits[tokens], places), NO_PARENT),
            [slots[tokens] for slots in host.slots],
        )


def _parents(bits: NDArray[np.int32], places: NDArray[np.int64]) -> NDArray[Any]:
    """Return the places of the parents of nodes, which are the last ones of their ancestors. bits: (R, M), of nodes in
    order."""
    others = bits.view(np.uint32) & ~(np.uint32(1) << places.astype(np.uint32))
    return np.frexp(others.astype(np.float64))[1].astype(np.int64) - 1


def move_right_nodes(host: HostBatch, tokens: Tensor, caches: Sequence[Sequence[Tensor]]) -> Tensor:
    """Find which nodes of the step's trees are right, and move what lies in their slots to where those of a chain would
    lie. All of it is queued behind the step, and before whatever is launched next: so nobody else has the slots yet.

    tokens: (n,) int64, what was sampled. caches: of each cache group, of four dimensions. Returns the order in which
    the states of sampled rows are those of chains, (rows,) int64.
    """
    trees = StepTrees.of(host)
    from batchinfer_kernels.gpu.draft_tree import move_slots, tree_paths

    order = np.arange(len(host.sampled_rows))
    arrays = [trees.firsts, trees.drafts, trees.parents, trees.rows, order, *trees.slots]
    firsts, drafts, parents, rows, placed, *slots = upload(arrays, tokens.device)
    paths = tree_paths(tokens, firsts, drafts, parents, rows, placed)
    for own, group in zip(slots, caches, strict=True):
        move_slots(group, own, paths)
    return placed
