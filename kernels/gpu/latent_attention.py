"""Causal attention over a paged cache of latents. Cost: batchinfer_kernels.cost.latent_attention_cost.

All heads read the same values of a token as key and value. The heads of a token and of its neighbours in the sequence
are therefore rows of one tile, which reads each cached token once. Chunks of a prompt are items of `prefill_items`. The
keys of single queries and drafts are split among programs (`attention_splits`), and the parts of a query are merged by
log-sum-exp, in order.

In deterministic mode a row's keys are split into segments at fixed positions, computed in tiles of one shape and folded
in order. The bits of a row do not depend on other rows or on how its prompt was chunked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.attention_core import as_part, fold, initial_state
from batchinfer_kernels.gpu.attention_launch import SEGMENT, VARYING
from batchinfer_kernels.gpu.attention_parts import OwnKeys, Parts, merge_parts
from batchinfer_kernels.gpu.attention_plan import LaunchPlan
from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.latent_tiles import chunk_tokens, latent_tiles
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.gpu.target import architecture
from batchinfer_kernels.latent_attention import check_latent_attention

MAX_LATENT = 1024  # values of a cached token
LOG2_E = 1.4426950408889634
MERGED = 4  # heads whose parts one program merges


@triton.jit
def _rows_of(tile, HEADS: tl.constexpr, ROWS: tl.constexpr):
    if HEADS % ROWS == 0:  # all rows belong to one query, which takes fewer registers
        first = tile * ROWS
        return tl.full([ROWS], first // HEADS, tl.int32), first % HEADS + tl.arange(0, ROWS)
    else:
        row = tile * ROWS + tl.arange(0, ROWS)
        return row // HEADS, row % HEADS


@triton.jit
def _load_queries(
    q_ptr, token, head, real, q_stride_token, q_stride_head,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    # In two parts: the RANK values that are multiplied by latents, and the other values
    value, rest = tl.arange(0, RANK_PADDED), RANK + tl.arange(0, REST_PADDED)
    row_ptr = q_ptr + token[:, None] * q_stride_token + head[:, None] * q_stride_head
    q = tl.load(row_ptr + value[None, :], mask=real[:, None] & (value < RANK)[None, :], other=0.0)
    q_rest = tl.load(row_ptr + rest[None, :], mask=real[:, None] & (rest < WIDTH)[None, :], other=0.0)
    return q, q_rest


@triton.jit
def _attend_latents(
    q, q_rest,
    row_at,  # (ROWS,) int32: positions; -1 for padding rows
    table_ptr, cache_ptr, stride_block, stride_slot,
    first, end,  # the keys [first, end) of the sequence are read
    scale,  # includes log2(e)
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The first RANK values of a token are also its V
    value, rest = tl.arange(0, RANK_PADDED), RANK + tl.arange(0, REST_PADDED)
    total = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        inside = key < end
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = cache_ptr + block * stride_block + (key % BLOCK_SIZE) * stride_slot
        latent = tl.load(
            at[:, None] + value[None, :], mask=inside[:, None] & (value < RANK)[None, :], other=0.0
        )
        beside = tl.load(
            at[:, None] + rest[None, :], mask=inside[:, None] & (rest < WIDTH)[None, :], other=0.0
        )
        scores = tl.dot(q_rest, tl.trans(beside), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(latent), scores, input_precision=PRECISION)
        seen = inside[None, :] & (key[None, :] <= row_at[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has not seen a key yet
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(q.dtype), latent, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    return total, top, mass


@triton.jit(do_not_specialize=VARYING)
def _latent_prefill_kernel(
    q_ptr, cache_ptr, tables_ptr,
    items_ptr,  # (n, 5) int32, from `prefill_items`
    out_ptr, q_stride_token, q_stride_head, stride_block, stride_slot, stride_table, scale, segment,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,  # programs of an item
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    SEGMENTED: tl.constexpr,
):  # fmt: skip
    item = items_ptr + tl.program_id(0) // TILES * 5
    nth, head = _rows_of(tl.program_id(0) % TILES, HEADS, ROWS)
    real = nth < tl.load(item + 2)
    token = tl.load(item + 1).to(tl.int64) + nth
    row_at = tl.where(real, tl.load(item + 3) + nth, -1)
    end = tl.max(row_at, 0) + 1
    q, q_rest = _load_queries(
        q_ptr, token, head, real, q_stride_token, q_stride_head, WIDTH, RANK, RANK_PADDED, REST_PADDED
    )
    table_ptr = tables_ptr + tl.load(item).to(tl.int64) * stride_table
    if SEGMENTED:
        total, top, mass = initial_state(None, head, real, ROWS, RANK_PADDED)
        for first in range(0, end, segment):
            part, part_top, part_mass = _attend_latents(
                q, q_rest, row_at, table_ptr, cache_ptr, stride_block, stride_slot,
                first, tl.minimum(first + segment, end), scale,
                WIDTH, RANK, RANK_PADDED, REST_PADDED, ROWS, TILE, BLOCK_SIZE, PRECISION,
            )  # fmt: skip
            part, lse = as_part(part, part_top, part_mass)
            total, top, mass = fold(total, top, mass, part, lse)
    else:
        total, top, mass = _attend_latents(
            q, q_rest, row_at, table_ptr, cache_ptr, stride_block, stride_slot, 0, end, scale,
            WIDTH, RANK, RANK_PADDED, REST_PADDED, ROWS, TILE, BLOCK_SIZE, PRECISION,
        )  # fmt: skip
    found, _ = as_part(total, top, mass)
    value = tl.arange(0, RANK_PADDED)
    out_at = (token * HEADS + head)[:, None] * RANK + value[None, :]
    cells = real[:, None] & (value < RANK)[None, :]
    tl.store(out_ptr + out_at, found.to(out_ptr.dtype.element_ty), mask=cells)


@triton.jit(do_not_specialize=VARYING)
def _latent_decode_kernel(
    q_ptr, cache_ptr, tables_ptr,
    items_ptr,  # (m, 4) int32: Splits.items
    rows_ptr,  # (n, 2) int32: row of q, sequence; None: both equal the index of the row
    chunks_ptr,  # (S, 2) int32: first row of q, queries of each sequence; None: each has one
    contexts_ptr,  # (S,) int32: keys of each sequence; with chunks (T,): keys that each query sees
    places_ptr,  # Splits.places; used only with chunks
    out_ptr,
    parts_ptr, lses_ptr,  # None: every row is one item, and is written to out
    q_stride_token, q_stride_head, stride_block, stride_slot, stride_table, scale,
    HEADS: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item = items_ptr + (tl.program_id(0) // TILES).to(tl.int64) * 4
    index = tl.load(item).to(tl.int64)
    if index < 0:
        return
    nth, head = _rows_of(tl.program_id(0) % TILES, HEADS, ROWS)
    sequence, first_query, queries = index, index, 1
    if chunks_ptr is not None:
        first_query = tl.load(chunks_ptr + index * 2).to(tl.int64)
        queries = tl.load(chunks_ptr + index * 2 + 1)
        if queries * HEADS <= tl.program_id(0) % TILES * ROWS:
            return
    elif rows_ptr is not None:
        first_query = tl.load(rows_ptr + index * 2).to(tl.int64)
        sequence = tl.load(rows_ptr + index * 2 + 1).to(tl.int64)
    real = nth < queries
    token = first_query + nth
    seen_at = sequence + nth if chunks_ptr is None else token
    row_at = tl.load(contexts_ptr + seen_at, mask=real, other=0) - 1
    first = tl.load(item + 1)
    end = tl.minimum(first + tl.load(item + 2), tl.max(row_at, 0) + 1)
    q, q_rest = _load_queries(
        q_ptr, token, head, real, q_stride_token, q_stride_head, WIDTH, RANK, RANK_PADDED, REST_PADDED
    )
    total, top, mass = _attend_latents(
        q, q_rest, row_at, tables_ptr + sequence * stride_table, cache_ptr, stride_block, stride_slot,
        first, end, scale, WIDTH, RANK, RANK_PADDED, REST_PADDED, ROWS, TILE, BLOCK_SIZE, PRECISION,
    )  # fmt: skip
    part, lse = as_part(total, top, mass)
    value = tl.arange(0, RANK_PADDED)
    cells = real[:, None] & (value < RANK)[None, :]
    if parts_ptr is not None:
        place = tl.load(item + 3).to(tl.int64) + tl.zeros([ROWS], tl.int64)
        if chunks_ptr is not None:  # all queries have the same number of parts
            place += nth * (tl.load(places_ptr + first_query + 1) - tl.load(places_ptr + first_query))
        slot = place * HEADS + head
        tl.store(parts_ptr + slot[:, None] * RANK + value[None, :], part, mask=cells)
        tl.store(lses_ptr + slot, lse, mask=real)
    else:
        # Folding a single part would not change it
        out_at = (token * HEADS + head)[:, None] * RANK + value[None, :]
        tl.store(out_ptr + out_at, part.to(out_ptr.dtype.element_ty), mask=cells)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    plan: LaunchPlan,
    scale: float,
    rank: int,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention over a paged cache of latents for all queries of a step: (T, heads, rank).

    The contract is `latent_attention_reference`. If the plan has no prefill items, the launch can be captured into a
    graph.

    Args:
        q: (T, heads, D).
        cache: (blocks, 1, block_size, D). The D values of a token are its key for every head, the first `rank` its
            value.
        block_tables: (S, blocks) int32.
        plan: the step's plan from `plan_attention` with a `latent` shape, without shared prefixes.
        scale: factor of q · k.
        rank: number of values of V.
        out: (T, heads, rank), contiguous; receives the result if given.

    Raises:
        ValueError: If shapes, dtypes or the plan do not match.
    """
    check_latent_attention(q, cache, block_tables, rank)
    check_same_dtype(q=q, cache=cache)
    unit_columns(q=q, cache=cache, block_tables=block_tables)
    if not scale > 0:
        raise ValueError(f"the scale of scores is {scale}; it must be greater than 0")
    if plan.prefixes is not None:
        raise ValueError("a plan over latents must not have shared prefixes")
    shape = (*q.shape[:2], rank)
    y = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    if y.shape != shape or not y.is_contiguous():
        raise ValueError(f"out is {tuple(y.shape)}, not {shape}, or not contiguous")
    if plan.items is not None:
        rows = chunk_tokens(q.shape[1]) * q.shape[1]
        named = _arguments(q, cache, block_tables, scale, rank, rows, plan.deterministic)
        grid = (len(plan.items) * named["TILES"],)
        _latent_prefill_kernel[grid](
            items_ptr=plan.items, out_ptr=y, segment=SEGMENT, SEGMENTED=plan.deterministic, **named
        )
    if plan.singles:
        _decode(q, cache, block_tables, plan, scale, rank, y)
    return y


def _decode(
    q: Tensor, cache: Tensor, block_tables: Tensor, plan: LaunchPlan, scale: float, rank: int, y: Tensor
) -> None:
    splits = plan.splits_of(None)
    own = OwnKeys(plan.contexts, splits, plan.rows, chunks=plan.chunks)
    own.check(q, block_tables, None)
    parts = None if splits.whole else Parts.of(q[..., :rank], 0, splits.parts)
    named = _arguments(q, cache, block_tables, scale, rank, splits.queries * q.shape[1], plan.deterministic)
    _latent_decode_kernel[(splits.count * named["TILES"],)](
        items_ptr=splits.items,
        rows_ptr=own.rows,
        chunks_ptr=own.chunks,
        contexts_ptr=own.contexts,
        places_ptr=splits.places,
        out_ptr=y,
        parts_ptr=None if parts is None else parts.values,
        lses_ptr=None if parts is None else parts.lses,
        **named,
    )
    if parts is not None:
        merge_parts(own, parts, min(MERGED, q.shape[1]), y, None, None)


def _arguments(
    q: Tensor, cache: Tensor, block_tables: Tensor, scale: float, rank: int, rows: int, deterministic: bool
) -> dict[str, Any]:
    _, heads, width = q.shape
    tiles = latent_tiles(q.dtype, rank, rows, deterministic)
    return {
        "q_ptr": q,
        "cache_ptr": cache,
        "tables_ptr": block_tables,
        "q_stride_token": q.stride(0),
        "q_stride_head": q.stride(1),
        "stride_block": cache.stride(0),
        "stride_slot": cache.stride(2),
        "stride_table": block_tables.stride(0),
        "scale": scale * LOG2_E,
        "HEADS": heads,
        "TILES": cdiv(rows, tiles.rows),
        "WIDTH": width,
        "RANK": rank,
        "RANK_PADDED": max(16, next_power_of_2(rank)),
        "REST_PADDED": max(16, next_power_of_2(max(1, width - rank))),
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "BLOCK_SIZE": cache.shape[2],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # matters for float32 only
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        # In deterministic mode only explicit fma is contracted, independent of how a kernel is compiled
        "enable_fp_fusion": not deterministic,
        # Without a bound the assembler uses fewer registers to keep more warps resident, and spills
        **({"maxnreg": 255} if q.dtype == torch.float32 and architecture().isdigit() else {}),
    }
