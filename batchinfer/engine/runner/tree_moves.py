"""Moves the right nodes of a step's trees behind the text, on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.staging import upload
from batchinfer.engine.tensors.step_trees import StepTrees


def move_right_nodes(host: HostBatch, tokens: Tensor, caches: Sequence[Sequence[Tensor]]) -> Tensor:
    """Find which nodes of the step's trees are right, and move what lies in their slots to where those of a chain would
    lie. All of it is queued behind the step, and before whatever is launched next: so nobody else has the slots yet.

    tokens: (n,) int64, what was sampled. caches: of each cache group, of four dimensions. Returns the order in which
    the states of sampled rows are those of chains, (rows,) int64.
    """
    trees = StepTrees.of(host)
    from batchinfer_kernels.gpu.move_slots import move_slots
    from batchinfer_kernels.gpu.tree_paths import tree_paths

    order = np.arange(len(host.sampled_rows))
    arrays = [trees.firsts, trees.drafts, trees.parents, trees.rows, order, *trees.slots]
    firsts, drafts, parents, rows, placed, *slots = upload(arrays, tokens.device)
    paths = tree_paths(tokens, firsts, drafts, parents, rows, placed)
    for own, group in zip(slots, caches, strict=True):
        move_slots(group, own, paths)
    return placed
