"""Attention of the queries of many sequences over keys that they share, which are read once in a matrix product.

The queries of a group are the rows of tiles as in prefill, and the keys of a level may be split among programs. Groups
form levels: the keys that all sequences of a group share, then the keys that subgroups share, and so on. The results of
all levels and of a row's own keys are folded by log-sum-exp (Hydragen, Juravsky et al., 2024; several levels:
FlashInfer's cascade, Ye et al., 2024). Cost: `attention_cost` with shared keys counted once, and `merge_state_cost`.
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
from batchinfer_kernels.gpu.attention_parts import OwnKeys, Parts
from batchinfer_kernels.gpu.step_arrays import StepArray
from batchinfer_kernels.paged_attention import ScoreRules


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The keys that several rows of decode attention share, made by `plan_attention` once per step.

    A row is one query. Shared keys are read once per group of rows.

    Attributes:
        held: the arrays "items", "members", "starts" and "places", which the properties describe.
        parts: number of partial results of all rows; in a captured graph the maximum for which there is room.
    """

    held: Mapping[str, StepArray]
    parts: int

    @property
    def items(self) -> Tensor:
        """Return the work items (m, 6) int32 on the device.

        The columns are:

        - index in `members` of the item's first query
        - number of queries; 0 for padding
        - index of a sequence that has the shared keys
        - first key
        - end of the keys, exclusive
        - index of the item's partial result among the results of each query
        """
        return self.held["items"].tensor

    @property
    def members(self) -> Tensor:
        """Return the indices of the queries of all work items, item by item, int32 on the device."""
        return self.held["members"].tensor

    @property
    def starts(self) -> Tensor:
        """Return the number of leading keys that each row of `OwnKeys` shares, (n,) int32 on the device."""
        return self.held["starts"].tensor

    @property
    def places(self) -> Tensor:
        """Return (queries + 1,) int32 on the device: query i has the partial results [places[i], places[i + 1])."""
        return self.held["places"].tensor


@triton.jit(do_not_specialize=VARYING)
def _prefix_attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, v_scale_ptr, items_ptr, members_ptr,
    rows_ptr,  # (n, 2) int32: row of q, sequence; None: both equal the index of the row
    contexts_ptr,  # OwnKeys.contexts: by sequence, or by query
    places_ptr,  # Prefixes.places
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
    if WINDOW:  # skip tiles before the windows of all rows
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
    """Return the maximum number of rows (queries) of a work item of `Prefixes`.

    Args:
        dtype: dtype of q.
        head_dim: number of values of a head.
        group: number of query heads per KV head.
        deterministic: as in `decode_attention`.
    """
    return choose_tiles("deterministic" if deterministic else "prefix", dtype, head_dim).rows // group


def attend_prefixes(
    prefixes: Prefixes,
    own: OwnKeys,
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
    """Compute attention of decode queries over the keys that they share, and write the partial results to `parts`.

    Args:
        prefixes: the shared keys.
        own: the rows of decode attention.
        parts: receives the partial results.
        q: (T, q_heads, D).
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        block_tables: (S, blocks) int32.
        rules: scale, sliding window and cap of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
        deterministic: True if a row's bits must not depend on other rows.

    Raises:
        ValueError: If the work items have the wrong shape, or `parts` is too small.
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
