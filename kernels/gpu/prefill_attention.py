"""Attention of query chunks over a paged KV cache, causal, or bidirectional for encoders.

A program takes a tile of query rows of one sequence, with the heads of one KV head packed into it, over all their keys
(FlashAttention-2, Dao, 2023; block tables as in vLLM's PagedAttention, Kwon et al., 2023). Sequences of any lengths
share a launch. Tiles that every row sees completely need no masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.gpu.attention_core import (
    LN2,
    as_part,
    attend_span,
    fold,
    initial_state,
    times,
    tree_begin,
)
from batchinfer_kernels.gpu.attention_launch import (
    SEGMENT,
    VARYING,
    Work,
    check_attention,
    choose_tiles,
    copy_to_device,
    kernel_arguments,
)
from batchinfer_kernels.paged_attention import ScoreRules

# With more stages, sm_90 would wait for each product if a bias is added to scores
_BIASED = {"num_stages": 1}
Lengths = Sequence[int] | NDArray[np.int64]


@triton.jit(do_not_specialize=VARYING)
def _prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    items_ptr,  # (n, 5) int32: sequence, first row of q, rows, position of the first, end of the keys
    bias_ptr,  # (q_heads, 2 x positions) float32, the second half for keys after the query; or None
    nearby_ptr,  # (T,) int32: TreeMask.nearby; None: no query is in a tree
    out_ptr, lse_ptr,
    q_stride_token, q_stride_head, stride_block, stride_head, stride_key, stride_scale, stride_table, out_stride_token,
    out_stride_head, lse_stride_token,
    bias_stride, scale, cap, window, segment,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr, SEGMENTED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # With SEGMENTED, keys are folded in segments of `segment`, for deterministic results
    q_stride_token, q_stride_head = q_stride_token * UNIT, q_stride_head * UNIT
    stride_block, stride_head, stride_key = times(UNIT, stride_block, stride_head, stride_key)
    item = items_ptr + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    sequence, first_row = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
    tokens, first_at = tl.load(item + 2), tl.load(item + 3)
    row = tl.arange(0, ROWS)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = token < tokens
    row_at = tl.where(real, first_at + token, -1)
    nearby = None
    if nearby_ptr is not None:
        nearby = tl.load(nearby_ptr + first_row + token, mask=real, other=-1)
    dim = tl.arange(0, D_PAD)
    cells = real[:, None] & (dim < D)[None, :]
    q_at = (first_row + token)[:, None] * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=cells, other=0.0)
    table_ptr = tables_ptr + sequence * stride_table
    k_ptr += kv_head.to(tl.int64) * stride_head
    v_ptr += kv_head.to(tl.int64) * stride_head
    end = tl.load(item + 4)
    begin, least = 0, 0
    if WINDOW:  # skip tiles before the window of the first row and after the window of the last row
        least = tl.maximum(first_at - window + 1, 0)
        begin = least // TILE * TILE
        if not CAUSAL:
            end = tl.minimum(end, first_at + tokens - 1 + window)
    own_bias = None
    if bias_ptr is not None:
        own_bias = bias_ptr + head * bias_stride + bias_stride // 2
    total, top, mass = initial_state(sinks_ptr, head, real, ROWS, D_PAD)
    if SEGMENTED:
        for segment_start in range(begin // segment * segment, end, segment):
            part = tl.zeros([ROWS, D_PAD], tl.float32)
            part_top = tl.full([ROWS], float("-inf"), tl.float32)
            part_mass = tl.zeros([ROWS], tl.float32)
            segment_first = tl.maximum(begin, segment_start)
            segment_end = tl.minimum(end, segment_start + segment)
            plain = segment_end
            if nearby_ptr is not None:
                plain = tree_begin(row_at, nearby, segment_first, segment_end, TILE)
            part, part_top, part_mass = attend_span(
                part, part_top, part_mass, q, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                kv_head, stride_block, stride_key, stride_scale,
                segment_first, plain, least, own_bias, None, scale, cap, window,
                D, D_PAD, TILE, BLOCK_SIZE, False, CAUSAL, WINDOW, CAP, CODES, PRECISION,
            )  # fmt: skip
            if nearby_ptr is not None:
                part, part_top, part_mass = attend_span(
                    part, part_top, part_mass, q, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    kv_head, stride_block, stride_key, stride_scale,
                    plain, segment_end, least, own_bias, nearby, scale, cap, window,
                    D, D_PAD, TILE, BLOCK_SIZE, False, CAUSAL, WINDOW, CAP, CODES, PRECISION,
                )  # fmt: skip
            part, lse = as_part(part, part_top, part_mass)
            total, top, mass = fold(total, top, mass, part, lse)
    else:
        whole = begin
        # Every row sees all keys up to the first row's position, or up to the end if not causal
        if not WINDOW:
            if CAUSAL:
                whole = (first_at + 1) // TILE * TILE
                if nearby_ptr is not None:
                    whole = tl.minimum(whole, tree_begin(row_at, nearby, 0, end, TILE) // TILE * TILE)
            else:
                whole = end // TILE * TILE
            total, top, mass = attend_span(
                total, top, mass, q, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                kv_head, stride_block, stride_key, stride_scale,
                0, whole, least, own_bias, None, scale, cap, window,
                D, D_PAD, TILE, BLOCK_SIZE, True, CAUSAL, WINDOW, CAP, CODES, PRECISION,
            )  # fmt: skip
        total, top, mass = attend_span(
            total, top, mass, q, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            kv_head, stride_block, stride_key, stride_scale,
            whole, end, least, own_bias, nearby, scale, cap, window,
            D, D_PAD, TILE, BLOCK_SIZE, False, CAUSAL, WINDOW, CAP, CODES, PRECISION,
        )  # fmt: skip
    out, lse = as_part(total, top, mass)
    out_at = (first_row + token)[:, None] * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=cells)
    if lse_ptr is not None:
        tl.store(lse_ptr + (first_row + token) * lse_stride_token + head, lse * LN2, mask=real)


def prefill_items(
    query_lens: Lengths,
    context_lens: Lengths,
    tokens_per_item: int,
    first_rows: NDArray[np.int64] | None = None,
    causal: bool = True,
) -> NDArray[np.int32]:
    """Split the queries of all sequences into work items of prefill attention: (n, 5) int32, the largest first.

    The columns are:

    - index of the sequence
    - first row of q
    - number of rows
    - position of the first row in the sequence
    - end of the keys that the rows see, exclusive

    Args:
        query_lens: number of queries of each sequence.
        context_lens: number of keys of each sequence, queries included.
        tokens_per_item: maximum number of queries of an item.
        first_rows: first row of q of each sequence. None: the sequences follow one another in q.
        causal: False if queries see all keys of their sequence.
    """
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    pieces = -(-lens // tokens_per_item)
    sequence = np.repeat(np.arange(len(lens)), pieces)
    before = (np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tokens_per_item
    items = np.empty((len(sequence), 5), np.int32)
    items[:, 0] = sequence
    items[:, 1] = (np.cumsum(lens) - lens if first_rows is None else first_rows)[sequence] + before
    items[:, 2] = np.minimum(tokens_per_item, lens[sequence] - before)
    items[:, 3] = (contexts - lens)[sequence] + before
    items[:, 4] = items[:, 2] + items[:, 3] if causal else contexts[sequence]
    order = np.argsort(-items[:, 4], kind="stable")
    return items[order]


def prefill_tokens(dtype: torch.dtype, head_dim: int, group: int, deterministic: bool = False) -> int:
    """Return the maximum number of query tokens of a work item of prefill attention.

    It is the argument `tokens_per_item` of `prefill_items`.

    Args:
        dtype: dtype of q.
        head_dim: number of values of a head.
        group: number of query heads per KV head.
        deterministic: as in `prefill_attention`.
    """
    return choose_tiles("deterministic" if deterministic else "prefill", dtype, head_dim).rows // group


def check_nearby(nearby: Tensor, queries: int, window: int | None, causal: bool) -> None:
    """Raise ValueError unless attention kernels support a step with draft trees.

    Attention must be causal, without a sliding window.

    Args:
        nearby: the tree masks from `TreeMask.nearby`, which must be (queries,) int32.
        queries: number of queries of the step.
        window: sliding window of the layer; None: full attention.
        causal: False for bidirectional attention.
    """
    if nearby.shape != (queries,) or nearby.dtype != torch.int32:
        raise ValueError(f"nearby is {tuple(nearby.shape)} {nearby.dtype}, expected ({queries},) int32")
    if window is not None or not causal:
        raise ValueError("a draft tree requires causal attention without a window")


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    rules: ScoreRules,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    items: Tensor | None = None,
    deterministic: bool = False,
    segment: int = SEGMENT,
    causal: bool = True,
    nearby: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute attention of query chunks over a paged KV cache, as `paged_attention_reference` does: (T, q_heads, D).

    Args:
        q: (T, q_heads, D), the queries of all sequences.
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        block_tables: (sequences, blocks) int32.
        query_lens: number of queries of each sequence.
        context_lens: number of keys of each sequence, queries included.
        rules: scale, sliding window, cap, sinks and bias of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
        items: work items from `prefill_items`, used instead of the lengths; the output of queries outside them is not
            written. None: they are made from the lengths.
        deterministic: True if a row's bits must depend only on its own sequence.
        segment: number of keys that are added to the softmax at a time in deterministic mode.
        causal: False if queries also see later keys.
        nearby: (T,) int32, TreeMask.nearby, for a step with draft trees; there must be no window. None: no draft trees.
        out: like q; receives the output if given.
        lse: (T, q_heads) float32; receives the natural log-sum-exp of scores if given.
    """
    check_attention(q, k_cache, v_cache, block_tables, rules.sinks, k_scale, v_scale)
    work: Work = "deterministic" if deterministic else "prefill"
    tiles = choose_tiles(work, q.dtype, q.shape[2], k_scale is not None)
    if segment % tiles.keys:
        raise ValueError(f"a segment of {segment} keys is not a multiple of a tile of {tiles.keys}")
    if nearby is not None:
        check_nearby(nearby, len(q), rules.window, causal)
    kv_heads, bias = k_cache.shape[1], rules.bias
    tokens = tiles.rows // (q.shape[1] // kv_heads)
    if items is None:
        items = copy_to_device(prefill_items(query_lens, context_lens, tokens, causal=causal), q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if len(items):
        _prefill_attention_kernel[(len(items), kv_heads)](
            items_ptr=items,
            sinks_ptr=rules.sinks,
            bias_ptr=bias,
            bias_stride=0 if bias is None else bias.stride(0),
            nearby_ptr=nearby,
            CAUSAL=causal,
            out_ptr=out,
            lse_ptr=lse,
            out_stride_token=out.stride(0),
            out_stride_head=out.stride(1),
            lse_stride_token=q.shape[1],
            segment=segment,
            **kernel_arguments(q, k_cache, v_cache, block_tables, rules, k_scale, v_scale, work)
            | ({} if bias is None else _BIASED),
        )
    return out
