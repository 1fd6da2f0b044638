"""Finds the accepted nodes of draft trees on the device, and moves their K and V next to each other.

The host does not need to know the sampled tokens in time. Cost: batchinfer_kernels.cost.copy_parts_cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.draft_tree import check_tree_paths
from batchinfer_kernels.gpu.attention_launch import copy_to_device
from batchinfer_kernels.gpu.checks import check_contiguous
from batchinfer_kernels.gpu.sizes import next_power_of_2

CELLS = 2048  # values that a program moves at a time: 16 per thread with 4 warps
_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}  # values are copied as integers


@triton.jit
def _tree_paths_kernel(
    tokens_ptr, firsts_ptr, drafts_ptr, parents_ptr, paths_ptr,
    rows_ptr, order_ptr,  # None: the order of rows is not needed
    PLACES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    place = tl.arange(0, PADDED)
    inside = place < PLACES
    draft = tl.load(drafts_ptr + tree * PLACES + place, mask=inside, other=-1)
    parent = tl.load(parents_ptr + tree * PLACES + place, mask=inside, other=-2)
    behind = tokens_ptr + tl.load(firsts_ptr + tree) + 1
    node = tl.full([], -1, tl.int32)
    for depth in range(PLACES):
        said = tl.load(behind + node, mask=node < PLACES, other=-1)
        # After the last accepted node, `node` is PLACES, which is the parent of no node
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
    """Return the accepted nodes of each of R draft trees, in order from the root, padded with -1: (R, M) int32.

    A node is accepted if its parent is accepted and its token equals the token sampled after its parent. The root of a
    tree is the last verified token, which is not a node itself. All tensors must be contiguous.

    Args:
        tokens: (n,) int64, the token sampled after each row of a step.
        firsts: (R,) int64, the row of each tree's last verified token. The rows of its M nodes follow in order.
        drafts: (R, M) int64, the tokens of the nodes.
        parents: (R, M) int64, the index of each node's parent within its tree; -1 for the last verified token.
        rows: (R,) int64, the index in `order` of each tree's last verified token. Given together with `order`.
        order: int64 vector. After each tree's last verified token, the rows of its accepted nodes are written in order;
            other entries stay. A draft head reads accepted tokens in this order. None: not needed.
    """
    check_tree_paths(tokens, firsts, drafts, parents)
    check_contiguous(tokens=tokens, firsts=firsts, drafts=drafts, parents=parents, rows=rows, order=order)
    if (rows is None) != (order is None) or (rows is not None and rows.shape != firsts.shape):
        raise ValueError("rows and order must be given together, with one row per tree")
    trees, places = drafts.shape
    paths = torch.empty(trees, places, dtype=torch.int32, device=drafts.device)
    if trees:
        _tree_paths_kernel[(trees,)](
            tokens, firsts, drafts, parents, paths, rows, order, PLACES=places, PADDED=next_power_of_2(places),
            num_warps=1,
        )  # fmt: skip
    return paths


@triton.jit(do_not_specialize=["heads", "block_size"])
def _move_slots_kernel(
    caches_ptr,  # (caches,) int64: addresses of the caches
    slots_ptr,  # (R, PLACES) int64
    paths_ptr,  # (R, PLACES) int32
    heads, block_size,
    PLACES: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    STRETCHES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    tree = tl.program_id(0) * PLACES
    head, stretch = tl.program_id(1) // STRETCHES, tl.program_id(1) % STRETCHES
    cache = tl.load(caches_ptr + tl.program_id(2)).to(tl.pointer_type(BITS))
    place = tl.arange(0, PADDED)
    node = tl.load(paths_ptr + tree + place, mask=place < PLACES, other=-1)
    moves = (node >= 0) & (node != place)
    source = tl.load(slots_ptr + tree + node, mask=moves, other=0)
    target = tl.load(slots_ptr + tree + place, mask=moves, other=0)
    read = ((source // block_size * heads + head) * block_size + source % block_size) * D
    written = ((target // block_size * heads + head) * block_size + target % block_size) * D
    value = stretch * WIDTH + tl.arange(0, WIDTH)
    cells = moves[:, None] & (value < D)[None, :]
    values = tl.load(cache + read[:, None] + value[None, :], mask=cells)
    tl.debug_barrier()  # another thread may write a slot that this thread reads
    tl.store(cache + written[:, None] + value[None, :], values, mask=cells)


def move_slots(caches: Sequence[Tensor], slots: Tensor, paths: Tensor) -> None:
    """Copy the K and V of each draft tree's accepted nodes to the slots of the tree's first nodes, in place.

    The accepted tokens, in order from the root, are then consecutive in the cache.

    Args:
        caches: K and V caches (blocks, heads, block_size, D), contiguous, of any dtypes, without duplicates.
        slots: (R, M) int64, the slots of the M nodes of each of R trees: block * block_size + offset.
        paths: (R, M) int32, the accepted nodes, from `tree_paths`.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    if slots.shape != paths.shape or (slots.dtype, paths.dtype) != (torch.int64, torch.int32):
        raise ValueError(
            f"slots are {tuple(slots.shape)} {slots.dtype}, paths {tuple(paths.shape)} {paths.dtype}"
        )
    check_contiguous(slots=slots, paths=paths, **{f"cache {at}": one for at, one in enumerate(caches)})
    kinds: dict[tuple[int, ...], list[Tensor]] = {}
    for cache in caches:
        kinds.setdefault((*cache.shape[1:], cache.element_size()), []).append(cache)
    trees, places = slots.shape
    for (heads, block_size, dim, size), own in kinds.items() if trees else ():
        padded = next_power_of_2(places)
        width = min(max(1, CELLS // padded), next_power_of_2(dim))
        begins = copy_to_device(np.array([cache.data_ptr() for cache in own]), slots.device, np.int64)
        _move_slots_kernel[(trees, heads * -(-dim // width), len(own))](
            begins, slots, paths, heads, block_size, PLACES=places, PADDED=padded, D=dim, WIDTH=width, BITS=_BITS[size],
            num_warps=4,
        )  # fmt: skip
