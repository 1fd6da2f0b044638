"""Finds the right nodes of trees of drafts where their tokens were sampled: no host has to know them in time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import check_contiguous
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.tree_paths import check_tree_paths


@triton.jit
def _tree_paths_kernel(
    tokens_ptr, firsts_ptr, drafts_ptr, parents_ptr, paths_ptr,
    rows_ptr, order_ptr,  # None: nobody asks for the order of rows
    PLACES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program a tree."""
    tree = tl.program_id(0)
    place = tl.arange(0, PADDED)
    inside = place < PLACES
    draft = tl.load(drafts_ptr + tree * PLACES + place, mask=inside, other=-1)
    parent = tl.load(parents_ptr + tree * PLACES + place, mask=inside, other=-2)
    behind = tokens_ptr + tl.load(firsts_ptr + tree) + 1
    node = tl.full([], -1, tl.int32)
    for depth in range(PLACES):
        said = tl.load(behind + node, mask=node < PLACES, other=-1)
        # Behind the last right one there is a node that is nobody's parent
        node = tl.min(tl.where((parent == node) & (draft == said), place, PLACES), 0)
        found = node < PLACES
        tl.store(paths_ptr + tree * PLACES + depth, tl.where(found, node, -1))
        if order_ptr is not None:
            first = tl.load(rows_ptr + tree) + 1
            tl.store(order_ptr + first + depth, first + node, mask=found)


def tree_paths(
    tokens: Tensor,
    firsts: Tensor,
    drafts: Tensor,
    parents: Tensor,
    rows: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Do what batchinfer_kernels.tree_paths.tree_paths_reference does. All tensors are contiguous.

    With `order`, (any,) int64, rows of right nodes are named there in the places of the first ones behind that of the
    last known token, which is `rows` (R,) int64 of each tree.
    """
    check_tree_paths(tokens, firsts, drafts, parents)
    check_contiguous(tokens=tokens, firsts=firsts, drafts=drafts, parents=parents, rows=rows, order=order)
    if (rows is None) != (order is None) or (rows is not None and rows.shape != firsts.shape):
        raise ValueError("rows and their order come together, a row of each tree")
    trees, places = drafts.shape
    paths = torch.empty(trees, places, dtype=torch.int32, device=drafts.device)
    if trees:
        _tree_paths_kernel[(trees,)](
            tokens, firsts, drafts, parents, paths, rows, order, PLACES=places, PADDED=next_power_of_2(places),
            num_warps=1,
        )  # fmt: skip
    return paths
