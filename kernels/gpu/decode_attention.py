"""Attention of one query per sequence, or of a few, over a paged KV cache; one launch for sequences of any lengths.

The query heads of a KV head are the rows of one tensor-core tile, padded to 16. A program reads a segment of one
sequence's keys, from a list on the device (`attention_splits`). The parts of a sequence are merged by log-sum-exp
(Flash-Decoding, Dao et al., 2023).

Several queries of a sequence, which verify drafts, are its last tokens. Their heads are further rows of the tile, so K
and V are read once for all of them, and each query sees the keys up to its own. Rows beyond a tile belong to the next
program, which finds the keys in the GPU's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.attention_codes import attend_codes
from batchinfer_kernels.gpu.attention_core import (
    LN2,
    as_part,
    attend_span,
    first_own_key,
    fold,
    initial_state,
    times,
    tree_begin,
)
from batchinfer_kernels.gpu.attention_launch import (
    VARYING,
    Work,
    check_attention,
    kernel_arguments,
)
from batchinfer_kernels.gpu.attention_parts import OwnKeys, Parts, merge_parts
from batchinfer_kernels.gpu.attention_splits import Splits
from batchinfer_kernels.gpu.prefix_attention import Prefixes, attend_prefixes
from batchinfer_kernels.paged_attention import ScoreRules


@triton.jit(do_not_specialize=VARYING)
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    items_ptr,  # (m, 4) int32: Splits.items
    rows_ptr,  # (n, 2) int32: row of q, sequence; None: both equal the index of the row
    chunks_ptr,  # (S, 2) int32: first row of q, queries of each sequence; None: each has one
    contexts_ptr,  # (S,) int32: keys of each sequence; with chunks (T,): keys that each query sees
    starts_ptr,  # (n,) int32: the keys [start, context) are read; None: start is 0
    places_ptr,  # Splits.places; used only with chunks
    nearby_ptr,  # (T,) int32: TreeMask.nearby, with chunks; None: no query is in a tree
    out_ptr, lse_ptr,
    parts_ptr, part_lses_ptr,  # None: every row is one item, and is written to out
    q_stride_token, q_stride_head, stride_block, stride_head, stride_key, stride_scale, stride_table,
    out_stride_token, out_stride_head, lse_stride_token, first_own, heads,
    scale, cap, window, align,
    D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr, SEGMENTED: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr,  # the cache is quantised, and `attend_codes` multiplies in float16
    TOKENS: tl.constexpr,  # queries per program
    TILES: tl.constexpr,  # programs per item and KV head
):  # fmt: skip
    CAUSAL: tl.constexpr = chunks_ptr is not None
    CACHE_UNIT: tl.constexpr = UNIT // 2 if WORDS else UNIT
    q_stride_token, q_stride_head = q_stride_token * UNIT, q_stride_head * UNIT
    stride_block, stride_head, stride_key = times(CACHE_UNIT, stride_block, stride_head, stride_key)
    item = items_ptr + (tl.program_id(0) // TILES).to(tl.int64) * 4
    index = tl.load(item).to(tl.int64)
    if index < 0:
        return
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    nearby = None
    if CAUSAL:
        sequence = index
        nth = tl.program_id(0) % TILES * TOKENS + row // GROUP
        first_query = tl.load(chunks_ptr + index * 2).to(tl.int64)
        queries = tl.load(chunks_ptr + index * 2 + 1)
        if queries <= tl.program_id(0) % TILES * TOKENS:
            return
        real = (row < GROUP * TOKENS) & (nth < queries)
        head = kv_head * GROUP + row % GROUP
        token = first_query + nth
        token_at = token[:, None]
        seen = tl.load(contexts_ptr + token, mask=real, other=0)
        row_at = seen - 1
        context = tl.max(seen, 0)
        if nearby_ptr is not None:
            nearby = tl.load(nearby_ptr + token, mask=real, other=-1)
        nearest = tl.load(contexts_ptr + first_query)  # the same in all programs of the sequence
    else:
        token, sequence = index, index
        if rows_ptr is not None:
            token = tl.load(rows_ptr + index * 2).to(tl.int64)
            sequence = tl.load(rows_ptr + index * 2 + 1).to(tl.int64)
        token_at = token
        real = row < GROUP
        head = kv_head * GROUP + row
        context = tl.load(contexts_ptr + sequence)
        row_at = tl.where(real, context - 1, -1)
        nearest = context
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + index)
    first = first_own_key(nearest, start, window, align, WINDOW) + tl.load(item + 1)
    end = tl.minimum(first + tl.load(item + 2), context)
    least = 0
    if WINDOW:
        least = tl.maximum(nearest - window, 0)
        first = tl.maximum(first, least // TILE * TILE)
    plain = end
    if nearby_ptr is not None:
        plain = tree_begin(row_at, nearby, first, end, TILE)
    dim = tl.arange(0, D_PAD)
    cells = real[:, None] & (dim < D)[None, :]
    q_at = token_at * q_stride_token + head[:, None] * q_stride_head
    table_ptr = tables_ptr + sequence * stride_table
    at_head = kv_head.to(tl.int64) * stride_head
    if WORDS:
        k_head = 2 * at_head if CODES == "fp8" else at_head
        total, top, mass = attend_codes(
            q_ptr, q_at, real, row_at, table_ptr, k_ptr + k_head, v_ptr + at_head,
            k_scale_ptr, v_scale_ptr, kv_head, stride_block, stride_key, stride_scale, first, plain, end,
            least, nearby, scale, cap, window,
            D, D_PAD, ROWS, TILE, BLOCK_SIZE, CAUSAL, WINDOW, CAP, CODES,
        )  # fmt: skip
    else:
        q = tl.load(q_ptr + q_at + dim[None, :], mask=cells, other=0.0)
        if SEGMENTED or parts_ptr is not None:
            total, top, mass = initial_state(None, head, real, ROWS, D_PAD)
        else:
            total, top, mass = initial_state(sinks_ptr, head, real, ROWS, D_PAD)
        total, top, mass = attend_span(
            total, top, mass, q, row_at, table_ptr, k_ptr + at_head, v_ptr + at_head,
            k_scale_ptr, v_scale_ptr, kv_head, stride_block, stride_key, stride_scale, first, plain,
            least, None, None, scale, cap, window,
            D, D_PAD, TILE, BLOCK_SIZE, False, CAUSAL, WINDOW, CAP, CODES, PRECISION,
        )  # fmt: skip
        if nearby_ptr is not None:
            total, top, mass = attend_span(
                total, top, mass, q, row_at, table_ptr, k_ptr + at_head, v_ptr + at_head,
                k_scale_ptr, v_scale_ptr, kv_head, stride_block, stride_key, stride_scale, plain, end,
                least, None, nearby, scale, cap, window,
                D, D_PAD, TILE, BLOCK_SIZE, False, CAUSAL, WINDOW, CAP, CODES, PRECISION,
            )  # fmt: skip
    part, lse = as_part(total, top, mass)
    if parts_ptr is not None:
        place = first_own + tl.load(item + 3).to(tl.int64)
        if CAUSAL:  # all queries have the same number of parts
            place += nth * (tl.load(places_ptr + first_query + 1) - tl.load(places_ptr + first_query))
        slot = place * heads + head
        tl.store(parts_ptr + slot[:, None] * D + dim[None, :], part, mask=cells)
        tl.store(part_lses_ptr + slot, lse, mask=real)
    else:
        if SEGMENTED or WORDS:
            total, top, mass = initial_state(sinks_ptr, head, real, ROWS, D_PAD)
            total, top, mass = fold(total, top, mass, part, lse)
            part, lse = as_part(total, top, mass)
        out_at = token_at * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
        tl.store(out_ptr + out_at, part.to(out_ptr.dtype.element_ty), mask=cells)
        if lse_ptr is not None:
            tl.store(lse_ptr + token * lse_stride_token + head, lse * LN2, mask=real)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    splits: Splits,
    rules: ScoreRules,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rows: Tensor | None = None,
    prefixes: Prefixes | None = None,
    chunks: Tensor | None = None,
    nearby: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute attention over a paged KV cache, for one query per sequence or, with `chunks`, a few.

    The contract is `paged_attention_reference`. The number of keys of a sequence is read on the device; with 0 keys the
    output is 0. Launches depend only on the sizes of `splits` and `prefixes`, so they can be captured into a graph. All
    layers of a step use the same plan.

    Args:
        q: (S, q_heads, D); with `rows` or `chunks` (T, q_heads, D).
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        block_tables: (S, blocks) int32.
        context_lens: (S,) int32, number of keys of each sequence; with `chunks` (T,) int32, keys up to each query's
            own.
        splits: how keys are split among programs, made for the window of `rules`.
        rules: scale, sliding window, cap, sinks and bias of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
        rows: (n, 2) int32, the row of q and the sequence of each query, if q has other rows too. The output of other
            rows is not written.
        prefixes: shared keys, from `plan_attention`, which are read once per group of sequences.
        chunks: (S, 2) int32, the first row of q and the number of queries of each sequence. The queries are its last
            tokens. Each row of q must belong to a sequence.
        nearby: (T,) int32, TreeMask.nearby, only with `chunks`; None: no query is in a draft tree.
        deterministic: True if a row's bits must depend only on its own keys. `splits` must be deterministic too.
        out: like q; receives the output if given.
        lse: (T, q_heads) float32; receives the natural log-sum-exp of scores if given.

    Returns:
        The output, like q.
    """
    check_attention(q, k_cache, v_cache, block_tables, rules.sinks, k_scale, v_scale)
    fast: Work = "decode" if k_cache.dtype == q.dtype else "coded decode"
    starts, places = (None, None) if prefixes is None else (prefixes.starts, prefixes.places)
    own = OwnKeys(context_lens, splits, rows, starts, places, chunks, nearby)
    own.check(q, block_tables, rules.window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    count = len(splits.keys)
    if count == 0:
        return out
    shared = 0 if prefixes is None else prefixes.parts
    parts = Parts.of(q, shared, splits.parts) if shared or not splits.whole else None
    common = (q, k_cache, v_cache, block_tables, rules, k_scale, v_scale)
    if prefixes is not None and parts is not None:
        attend_prefixes(prefixes, own, parts, *common, deterministic)
    work: Work = "deterministic" if deterministic else fast
    arguments = kernel_arguments(*common, work, splits.queries, nearby is not None)
    attend_own(own, arguments, parts, out, lse, rules.sinks)
    if parts is not None:
        merge_parts(own, parts, q.shape[1] // k_cache.shape[1], out, lse, rules.sinks)
    return out


def attend_own(
    own: OwnKeys,
    arguments: dict[str, Any],
    parts: Parts | None,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Compute decode attention over the keys that rows read for themselves.

    Args:
        own: the rows, their keys and splits.
        arguments: kernel arguments from `kernel_arguments`.
        parts: receives partial results if rows are split or share keys; None: results are written to `out` and `lse`.
        out: (T, q_heads, D).
        lse: (T, q_heads) float32, or None if it is not needed.
        sinks: (q_heads,), the attention sinks, or None.
    """
    heads, queries = out.shape[1], own.splits.queries
    tokens = min(queries, arguments["ROWS"] // arguments["GROUP"])
    tiles = -(-queries // tokens)
    grid = (own.splits.count * tiles, heads // arguments["GROUP"])
    _decode_attention_kernel[grid](
        sinks_ptr=sinks,
        items_ptr=own.splits.items,
        rows_ptr=own.rows,
        chunks_ptr=own.chunks,
        contexts_ptr=own.contexts,
        starts_ptr=own.starts,
        places_ptr=own.splits.places,
        nearby_ptr=own.nearby,
        out_ptr=out,
        lse_ptr=lse,
        parts_ptr=None if parts is None else parts.values,
        part_lses_ptr=None if parts is None else parts.lses,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_stride_token=heads,
        first_own=0 if parts is None else parts.first_own,
        heads=heads,
        align=own.splits.align,
        TOKENS=tokens,
        TILES=tiles,
        **_in_words(arguments, out.dtype),
    )


def _in_words(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    # `attend_codes` reads a quantised cache as 16-bit words. It does not support odd head sizes, deterministic mode and
    # float32, which needs more than float16
    codes, even = arguments["CODES"], arguments["D"] % 2 == 0 and arguments["UNIT"] % 2 == 0
    if codes == "none" or not even or arguments["SEGMENTED"] or dtype == torch.float32:
        return {**arguments, "WORDS": False}
    k, v = arguments["k_ptr"], arguments["v_ptr"].view(torch.int16)
    return {**arguments, "k_ptr": k if codes == "fp8" else k.view(torch.int16), "v_ptr": v, "WORDS": True}
