"""Moves the accepted nodes of draft trees to consecutive slots on a GPU, without waiting for it."""

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

MIN_NODES = 8  # more than a row's drafts in a CUDA graph: kernels are compiled for one width only


class StepTrees(NamedTuple):
    """The draft trees of a step, as arrays: R trees of up to M nodes.

    A sampled row is a token of the step that has an output, such as a sampled token.

    Attributes:
        firsts: [R], the row of each sequence's last known token: its index among the rows that get tokens.
        rows: [R], the index of the same row among all sampled rows.
        drafts: [R, M], the token of each node, padded with -1.
        parents: [R, M], the index of each node's parent, or -1 for the last known token; padded with NO_PARENT.
        slots: [R, M] per cache group, the KV cache slot of each node.
    """

    firsts: Longs
    rows: Longs
    drafts: Longs
    parents: Longs
    slots: list[Longs]

    @classmethod
    def of(cls, host: HostBatch) -> StepTrees:
        """Return the draft trees of a step that has at least one.

        Args:
            host: The inputs of the step.
        """
        assert host.tree is not None, "the step has no draft trees"
        ends = np.array([*accumulate(host.query_lens)])
        nodes = np.concatenate([[0], np.cumsum(host.tree.bits != 0)])
        counts = nodes[ends] - nodes[ends - np.array(host.query_lens)]
        ends, counts = ends[counts > 0], counts[counts > 0]
        places = np.arange(max(MIN_NODES, 1 << (int(counts.max()) - 1).bit_length()))
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
    others = bits.view(np.uint32) & ~(np.uint32(1) << places.astype(np.uint32))
    return np.frexp(others.astype(np.float64))[1].astype(np.int64) - 1


def move_accepted_nodes(host: HostBatch, tokens: Tensor, caches: Sequence[Sequence[Tensor]]) -> Tensor:
    """Find the accepted nodes of a step's draft trees, and move their keys and values to consecutive slots.

    The work is queued on the device; the host does not wait for it.

    Args:
        host: The inputs of the step.
        tokens: int64 [n], the tokens that the step sampled.
        caches: For each cache group, the 4-dimensional tensors that have data per KV cache slot.

    Returns:
        int64 [rows], the permutation that orders the hidden states of the step's sampled rows in the same way.
    """
    # The work is queued before the next step, so no other sequence uses the slots yet
    trees = StepTrees.of(host)
    from batchinfer_kernels.gpu.draft_tree import move_slots, tree_paths

    order = np.arange(len(host.sampled_rows))
    arrays = [trees.firsts, trees.drafts, trees.parents, trees.rows, order, *trees.slots]
    firsts, drafts, parents, rows, placed, *slots = upload(arrays, tokens.device)
    paths = tree_paths(tokens, firsts, drafts, parents, rows, placed)
    for own, group in zip(slots, caches, strict=True):
        move_slots(group, own, paths)
    return placed
