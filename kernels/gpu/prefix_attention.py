"""Attention of many sequences' queries over keys that all of them share, read once: as a matrix product.

The queries of a group are the rows of tiles as in prefill, and a level's keys may be split among programs. Groups form
levels: what all of a group share, then what parts of it share behind that, and so on. What a row gets from each is
folded with its own part by log-sum-exp (Hydragen, Juravsky et al., 2024; several levels: FlashInfer's cascade, Ye et
al., 2024). Cost: `attention_cost` with shared keys counted once, and `merge_state_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.attention_core import (
    as_part,
    attend_span,
    initial_state,
    times,
)
from batchinfer_kernels.gpu.attention_launch import VARYING, Work, choose_tiles, kernel_arguments
from batchinfer_kernels.gpu.attention_parts import Own, Parts
from batchinfer_kernels.gpu.step_arrays import StepArray
from batchinfer_kernels.paged_attention import ScoreRules


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The rows that share keys, and the keys that they share; made by `plan_attention`, once a step. A row is one
    query, whatever it is in `Own`."""

    held: Mapping[str, StepArray]  # items, members, starts and places, by these names
    parts: int  # of all rows together, and what a graph has room for beyond them

    @property
    def items(self) -> Tensor:
        """(m, 6) int32 on the device: first member, members (0: padding), sequence with the keys, first key, end,
        number of the part among those of a row."""
        return self.held["items"].tensor

    @property
    def members(self) -> Tensor:
        """Rows, int32 on the device; an item names a stretch of them."""
        return self.held["members"].tensor

    @property
    def starts(self) -> Tensor:
        """(n,) int32 on the device: the keys before it are shared, of each row of `Own`."""
        return self.held["starts"].tensor

    @property
    def places(self) -> Tensor:
        """(queries + 1,) int32 on the device: row i's shared parts lie at places[i] to places[i + 1]."""
        return self.held["places"].tensor


@triton.jit(do_not_specialize=VARYING)
def _prefix_attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, v_scale_ptr, items_ptr, members_ptr,
    rows_ptr,  # (n, 2) int32: row of q, sequence; None: both are the number of the row
    contexts_ptr,  # of `Own`: of each sequence, or of each query, which then has its number
    places_ptr,  # of `Prefixes`
    parts_ptr, part_lses_ptr,
    q_stride_token, q_stride_head, stride_block, stride_head, stride_key, stride_scale, stride_table, heads,
    scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr, SEGMENTED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    q_stride_token, q_stride_head = q_stride_token * UNIT, q_stride_head * UNIT
    stride_block, stride_head, stride_key = times(UNIT, stride_block, stride_head, stride_key)
    item = items_ptr + tl.program_id(0).to(tl.int64) * 6
    kv_head = tl.program_id(1)
    first_member, members = tl.load(item), tl.load(item + 1)
    if members == 0:
        return
    first, end = tl.load(item + 3), tl.load(item + 4)
    row = tl.arange(0, ROWS)
    member, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = member < members
    index = tl.load(members_ptr + first_member + member, mask=real, other=0).to(tl.int64)
    token, sequence = index, index
    if rows_ptr is not None:
        token = tl.load(rows_ptr + index * 2).to(tl.int64)
        sequence = tl.load(rows_ptr + index * 2 + 1).to(tl.int64)
    row_at = tl.full([ROWS], -1, tl.int32)
    least = 0
    if WINDOW:  # tiles that every row has left behind change nothing
        context = tl.load(contexts_ptr + sequence)
        row_at = tl.where(real, context - 1, -1)
        nearest = tl.min(tl.where(real, context, 2147483647), 0)
        least = tl.maximum(nearest - window, 0)
        first = tl.maximum(first, least // TILE * TILE)
    dim = tl.arange(0, D_PAD)
    cells = real[:, None] & (dim < D)[None, :]
    q_at = token[:, None] * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=cells, other=0.0)
    no_sinks: tl.constexpr = None
    total, top, mass = initial_state(no_sinks, head, real, ROWS, D_PAD)
    whole: tl.constexpr = not WINDOW and not SEGMENTED
    total, top, mass = attend_span(
        total, top, mass, q, row_at, tables_ptr + tl.load(item + 2).to(tl.int64) * stride_table,
        k_ptr + kv_head.to(tl.int64) * stride_head, v_ptr + kv_head.to(tl.int64) * stride_head,
        k_scale_ptr, v_scale_ptr, kv_head, stride_block, stride_key, stride_scale, first, end,
        least, None, None, scale, cap, window,
        D, D_PAD, TILE, BLOCK_SIZE, whole, False, WINDOW, CAP, CODES, PRECISION,
    )  # fmt: skip
    part, lse = as_part(total, top, mass)
    place = tl.load(places_ptr + index, mask=real, other=0) + tl.load(item + 5)
    at = place.to(tl.int64) * heads + head
    tl.store(parts_ptr + at[:, None] * D + dim[None, :], part, mask=cells)
    tl.store(part_lses_ptr + at, lse, mask=real)


def prefix_members(dtype: torch.dtype, head_dim: int, group: int, deterministic: bool = False) -> int:
    """How many rows an item of `Prefixes` may have."""
    return choose_tiles("deterministic" if deterministic else "prefix", dtype, head_dim).rows // group


def attend_prefixes(
    prefixes: Prefixes,
    own: Own,
    parts: Parts,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rules: ScoreRules,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    deterministic: bool,
) -> None:
    """Every group's queries over what they share, to `parts`. The grid has an item a program, padding included.

    Raises ValueError when items have other columns than the kernel knows, or there is room for too few parts.
    """
    if prefixes.items.dim() != 2 or prefixes.items.shape[1] != 6 or prefixes.parts > parts.first_own:
        raise ValueError(
            f"items are {tuple(prefixes.items.shape)}, parts {prefixes.parts} > {parts.first_own}"
        )
    if not len(prefixes.items):
        return
    work: Work = "deterministic" if deterministic else "prefix"
    _prefix_attention_kernel[(len(prefixes.items), k_cache.shape[1])](
        items_ptr=prefixes.items,
        members_ptr=prefixes.members,
        rows_ptr=own.rows,
        contexts_ptr=own.contexts,
        places_ptr=prefixes.places,
        parts_ptr=parts.values,
        part_lses_ptr=parts.lses,
        heads=q.shape[1],
        **kernel_arguments(q, k_cache, v_cache, block_tables, rules, k_scale, v_scale, work),
    )
