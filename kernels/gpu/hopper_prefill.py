"""Causal attention of query chunks over a paged KV cache for compute capability 9.0, in Gluon; without draft trees.

It computes what `prefill_attention` does. A program takes a tile of query rows of one sequence, with the heads of one
KV head packed into it. One warp loads pages of keys and values with the hardware's tensor copies (TMA), and two warp
groups multiply 64 rows each. A group overlaps two products: the scores of a tile and the values of the tile before, and
runs the softmax alongside the second one (FlashAttention-3, Shah et al., 2024). For a quantised cache, another warp
group widens the tiles in between.

Tensor copies have no masks, but slots after a sequence's end or before its window may hold NaN, and 0 × NaN is NaN. The
hardware writes 0 outside a tensor's bounds. The first and the last page of a sequence are therefore read shifted by
`page_shift` rows: rows that do not belong to the sequence are out of bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from batchinfer_kernels.gpu.attention_core import LOG2E
from batchinfer_kernels.gpu.attention_launch import check_attention, padded_dim
from batchinfer_kernels.gpu.hopper_tiles import (
    REGISTERS,
    REGISTERS_OF_CODES,
    ROWS,
    STAGES,
    TILE,
    why_not,
)
from batchinfer_kernels.paged_attention import ScoreRules

DTYPES = (torch.bfloat16, torch.float16)
VARYING = ["stride_table"]


@gluon.jit
def first_key(first_at, window, WINDOW: gl.constexpr):
    """Return the first key that any query of a work item sees.

    `first_at` is the position of the item's first query; WINDOW is true if there is a sliding window.
    """
    if WINDOW:
        return gl.maximum(first_at - window + 1, 0)
    else:
        return gl.to_tensor(0)


@gluon.jit
def page_shift(page, least, end, SIZE: gl.constexpr):
    """Return the shift in rows of a page of keys in its tile: key `page` + i is at row i - shift.

    It is negative for a page that reaches beyond `end`, the end of the sequence. It is positive for the page that
    contains `least`, the first key of the window. SIZE is the number of keys of a page.
    """
    return gl.minimum(gl.maximum(end - page, 0), SIZE) - SIZE + gl.maximum(least - page, 0)


@gluon.jit
def _load_tile(
    desc, ring, slot, first, table_ptr, kv_head, least, end,
    TILE: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles, full, empty = ring
    stage = slot % STAGES
    PAGES: gl.constexpr = TILE // SIZE
    mbarrier.wait(empty.index(stage), (slot // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes * PAGES)
    for number in gl.static_range(PAGES):
        page = first + number * SIZE
        block = gl.load(table_ptr + page // SIZE, mask=page < end, other=0)
        shift = page_shift(page, least, end, SIZE)
        place = tiles.index(stage).slice(number, 1)
        tma.async_copy_global_to_shared(desc, [block, kv_head, shift, 0], full.index(stage), place)


@gluon.jit
def load_tiles(
    k_desc, v_desc, k_ring, v_ring, tables_ptr, stride_table, item_ptr, kv_head, window,
    TILE: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Run the loading warp of one work item: load tiles of K and V into ring buffers as these become empty.

    - k_desc, v_desc: tensor descriptors of the caches, (blocks, kv_heads, SIZE, D).
    - k_ring, v_ring: (tiles, full, empty), STAGES buffers with a barrier each for full and empty; with CODES (a
      quantised cache) both are the same ring.
    - item_ptr: the item, from `prefill_items`. TILE and SIZE: numbers of keys of a tile and of a page.
    """
    table_ptr = tables_ptr + gl.load(item_ptr).to(gl.int64) * stride_table
    end = gl.load(item_ptr + 4)
    least = first_key(gl.load(item_ptr + 3), window, WINDOW)
    begin = least // SIZE * SIZE
    for i in range((end - begin + TILE - 1) // TILE):
        k_slot, v_slot = i, i
        if CODES:
            k_slot, v_slot = 2 * i, 2 * i + 1
        first = begin + i * TILE
        _load_tile(k_desc, k_ring, k_slot, first, table_ptr, kv_head, least, end, TILE, SIZE, STAGES)
        _load_tile(v_desc, v_ring, v_slot, first, table_ptr, kv_head, least, end, TILE, SIZE, STAGES)


@gluon.jit
def _widen_tile(
    codes, slot, ring, i, scale_ptr, stride_scale, table_ptr, kv_head, first, least, end,
    TILE: gl.constexpr, SIZE: gl.constexpr, D_PAD: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 32  # rows at a time, limited by registers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D_PAD, D_PAD // 16], [4, 1], [1, 0])
    tiles, full, empty = ring
    code_tiles, _code_full, code_empty = codes
    _await(codes, slot, STAGES)
    mbarrier.wait(empty.index(i % STAGES), (i // STAGES) & 1 ^ 1)
    source = code_tiles.index(slot % STAGES).reshape([TILE, D_PAD])
    target = tiles.index(i % STAGES).reshape([TILE, D_PAD])
    for number in gl.static_range(TILE // ROWS):
        column = first + number * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        page = column // SIZE * SIZE
        key = column + page_shift(page, least, end, SIZE)
        # Outside the sequence the copies wrote 0, and the scale may be NaN
        real = (key >= page) & (key < page + SIZE)
        block = gl.load(table_ptr + page // SIZE, mask=real, other=0).to(gl.int64)
        scale_at = block * stride_scale + kv_head * SIZE + (key - page)
        scale = gl.load(scale_ptr + scale_at, mask=real, other=0.0)
        values = source.slice(number * ROWS, ROWS).load(LAYOUT).to(gl.float32)
        target.slice(number * ROWS, ROWS).store((values * gl.expand_dims(scale, 1)).to(DTYPE))
    fence_async_shared()  # orders these writes before tensor cores read them, and these reads before the next copy
    mbarrier.arrive(full.index(i % STAGES))
    mbarrier.arrive(code_empty.index(slot % STAGES))


@gluon.jit
def widen_tiles(
    codes, k_ring, v_ring, k_scale_ptr, v_scale_ptr, stride_scale, tables_ptr, stride_table, item_ptr, kv_head,
    window, TILE: gl.constexpr, SIZE: gl.constexpr, D_PAD: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Run the widening warp group of one work item: dequantise tiles of K and V, rounded to q's dtype DTYPE.

    - codes: the ring (tiles, full, empty) of quantised tiles, K and V in turn.
    - k_ring, v_ring: the rings that receive dequantised tiles.
    - item_ptr: the item, from `prefill_items`. TILE and SIZE: numbers of keys of a tile and of a page.
    """
    table_ptr = tables_ptr + gl.load(item_ptr).to(gl.int64) * stride_table
    end = gl.load(item_ptr + 4)
    least = first_key(gl.load(item_ptr + 3), window, WINDOW)
    begin = least // SIZE * SIZE
    for i in range((end - begin + TILE - 1) // TILE):
        first = begin + i * TILE
        _widen_tile(
            codes, 2 * i, k_ring, i, k_scale_ptr, stride_scale, table_ptr, kv_head, first, least, end,
            TILE, SIZE, D_PAD, STAGES, DTYPE,
        )  # fmt: skip
        _widen_tile(
            codes, 2 * i + 1, v_ring, i, v_scale_ptr, stride_scale, table_ptr, kv_head, first, least, end,
            TILE, SIZE, D_PAD, STAGES, DTYPE,
        )  # fmt: skip


@gluon.jit
def _await(ring, i, STAGES: gl.constexpr):
    _tiles, full, _empty = ring
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def _key_product(q_rows, k_ring, i, blank, TILE: gl.constexpr, STAGES: gl.constexpr):
    _await(k_ring, i, STAGES)
    tiles, _full, _empty = k_ring
    k = tiles.index(i % STAGES).reshape([TILE, q_rows.shape[1]])
    return warpgroup_mma(q_rows, k.permute([1, 0]), blank, use_acc=False, is_async=True)


@gluon.jit
def _value_product(weights, v_ring, i, total, TILE: gl.constexpr, STAGES: gl.constexpr):
    tiles, _full, _empty = v_ring
    v = tiles.index(i % STAGES).reshape([TILE, total.type.shape[1]])
    return warpgroup_mma(weights, v, total, is_async=True)


@gluon.jit
def _empty(ring, i, STAGES: gl.constexpr):
    _tiles, _full, empty = ring
    mbarrier.arrive(empty.index(i % STAGES))


@gluon.jit
def capped(scores, rate):
    """Return tanh(scores × scale / cap). The caller multiplies it by `cap` to get capped scores.

    `rate` is 2 log2(e) × scale / cap.
    """
    # tanh(y) = 1 - 2 / (1 + e^2y) is correct for infinite y too
    return 1.0 - 2.0 / (1.0 + gl.exp2(scores * rate))


@gluon.jit
def visible(
    scores, row_at, first, least, end, window,
    TILE: gl.constexpr, SIZE: gl.constexpr, WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the scores (rows, TILE) of a tile, with -inf for keys outside the sequence, or that a row does not see.

    A row sees keys up to its position `row_at`, and within its window if WINDOW. The tile begins at key `first`. The
    item reads the keys [least, end) in pages of SIZE keys, see `page_shift`.
    """
    # A thread computes one column and gets the others by a layout conversion: computing all needs too many registers
    column = first + gl.arange(0, TILE, gl.BlockedLayout([1], [32], [4], [0]))
    page = column // SIZE * SIZE
    key = column + page_shift(page, least, end, SIZE)
    # Keys outside the sequence get a position after every row
    key = gl.where((key >= page) & (key < page + SIZE), key, 2147483647)
    key = gl.convert_layout(key, gl.SliceLayout(0, LAYOUT))
    key, row_at = gl.expand_dims(key, 0), gl.expand_dims(row_at, 1)
    seen = key <= row_at
    if WINDOW:
        seen = seen & (key > row_at - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def fold_scores(scores, top, mass, unit, WINDOW: gl.constexpr):
    """Add the scores (rows, keys) of a tile to the running softmax of the rows.

    `top` and `mass` are each row's maximum score × `unit` and sum of weights so far. `unit` is the scale of scores ×
    log2(e), above 0. WINDOW is true if rows may see no key of the tile.

    Returns:
        The weights of the tile, the new maximum, the new sum of weights, and the factor for sums of earlier tiles.
    """
    higher = gl.maximum(top, gl.max(scores, 1) * unit)
    base = higher
    if WINDOW:  # a row whose window starts after the first tile has seen no key yet
        base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * unit - gl.expand_dims(base, 1))
    shrink = gl.exp2(top - base)
    return weights, higher, mass * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def row_places(
    item_ptr, kv_head, stride_token, stride_head,
    PART: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, D_PAD: gl.constexpr, GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the offsets of a warp group's rows in q or out, (ROWS, D_PAD), and which of their values are not padding.

    A row is a query and one of the GROUP query heads of `kv_head`. PART is the number of the warp group. The strides
    are from token to token and head to head in q or out.
    """
    # Reloaded each time, because no register is free to keep it while tiles are multiplied
    first_row = gl.load(item_ptr + 1, volatile=True)
    tokens = gl.load(item_ptr + 2, volatile=True)
    row = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim = gl.expand_dims(gl.arange(0, D_PAD, gl.SliceLayout(0, LAYOUT)), 0)
    real = gl.expand_dims(token < tokens, 1) & (dim < D)
    return gl.expand_dims((first_row + token).to(gl.int64) * stride_token + head * stride_head, 1) + dim, real


@gluon.jit
def multiply_tiles(
    q_ptr, out_ptr, sinks_ptr, item_ptr, kv_head, strides, q_tiles, k_ring, v_ring, unit, rate, window,
    PART: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, SIZE: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Run a multiplying warp group: compute attention of the rows [PART × ROWS, (PART + 1) × ROWS) of a work item.

    - strides: strides of a token and a head in q, then in out.
    - q_tiles (GROUPS, ROWS, D_PAD): shared memory for q, then for the output.
    - k_ring, v_ring: (tiles, full, empty), buffers of K and V with a barrier each for full and empty.
    - unit: scale of scores × log2(e). rate: see `capped`.
    - WINDOW and CAP state whether `window` and a cap apply; TILE and SIZE are the numbers of keys of a tile and of a
      page.
    """
    ROWS: gl.constexpr = q_tiles.shape[1]
    D_PAD: gl.constexpr = q_tiles.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_PAD, D_PAD // 8], [4, 1], [1, 0])
    q_stride_token, q_stride_head, out_stride_token, out_stride_head = strides
    at, real = row_places(item_ptr, kv_head, q_stride_token, q_stride_head, PART, ROWS, D, D_PAD, GROUP, WIDE)
    q_rows = q_tiles.index(PART)
    q_rows.store(gl.load(q_ptr + at, mask=real, other=0.0))
    fence_async_shared()  # orders these writes before tensor cores read them

    tokens, first_at, end = gl.load(item_ptr + 2), gl.load(item_ptr + 3), gl.load(item_ptr + 4)
    least = first_key(first_at, window, WINDOW)
    begin = least // SIZE * SIZE
    own = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    # Padding rows see the same keys as the last row, which gives them a finite maximum
    row_at = gl.minimum(first_at + own // GROUP, end - 1)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    mass = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    if sinks_ptr is not None:
        top = gl.load(sinks_ptr + kv_head * GROUP + own % GROUP).to(gl.float32) * LOG2E
        mass = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([ROWS, D_PAD], 0.0, gl.float32, TOTAL)
    blank = gl.full([ROWS, TILE], 0.0, gl.float32, SCORES)

    tiles = (end - begin + TILE - 1) // TILE
    whole = (first_at + 1 - begin) // TILE  # from this tile on, rows do not see all keys
    left = 0  # before this tile, windows exclude some keys
    if WINDOW:
        left = (first_at + tokens - window - begin + TILE - 1) // TILE
    scores = _key_product(q_rows, k_ring, 0, blank, TILE, STAGES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _empty(k_ring, 0, STAGES)
    if CAP:
        scores = capped(scores, rate)
    if (whole <= 0) | (left > 0):
        scores = visible(scores, row_at, begin, least, end, window, TILE, SIZE, WINDOW, SCORES)
    weights, top, mass, shrink = fold_scores(scores, top, mass, unit, WINDOW)
    _await(v_ring, 0, STAGES)
    p = gl.convert_layout(weights.to(q_tiles.dtype), WEIGHTS)
    for i in range(1, tiles):
        scores = _key_product(q_rows, k_ring, i, blank, TILE, STAGES)
        total = _value_product(p, v_ring, i - 1, total, TILE, STAGES)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _empty(k_ring, i, STAGES)
        if CAP:
            scores = capped(scores, rate)
        if (i >= whole) | (i < left):
            first = begin + i * TILE
            scores = visible(scores, row_at, first, least, end, window, TILE, SIZE, WINDOW, SCORES)
        weights, top, mass, shrink = fold_scores(scores, top, mass, unit, WINDOW)
        # This wait separates the softmax from the wait for the product: NVIDIA's assembler would move the latter up,
        # but moves no wait across a branch
        _await(v_ring, i, STAGES)
        total, p = warpgroup_mma_wait(0, deps=(total, p))
        _empty(v_ring, i - 1, STAGES)
        total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, TOTAL)), 1)
        p = gl.convert_layout(weights.to(q_tiles.dtype), WEIGHTS)
    total = _value_product(p, v_ring, tiles - 1, total, TILE, STAGES)
    total, p = warpgroup_mma_wait(0, deps=(total, p))

    total = total / gl.expand_dims(gl.convert_layout(mass, gl.SliceLayout(1, TOTAL)), 1)
    q_rows.store(total.to(q_tiles.dtype))  # via shared memory, to store whole rows
    at, real = row_places(
        item_ptr, kv_head, out_stride_token, out_stride_head, PART, ROWS, D, D_PAD, GROUP, WIDE
    )
    gl.store(out_ptr + at, q_rows.load(WIDE), mask=real)


@gluon.jit
def _ring(
    dtype: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr, SIZE: gl.constexpr, D_PAD: gl.constexpr,
    STAGES: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE // SIZE, 1, SIZE, D_PAD], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return tiles, full, empty


@gluon.jit(do_not_specialize=VARYING)
def _hopper_prefill_kernel(
    q_ptr, k_desc, v_desc, tables_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr,  # (blocks, kv_heads, SIZE) float32 with CODES, else None
    items_ptr,  # (n, 5) int32, from `prefill_items`
    out_ptr, q_stride_token, q_stride_head, out_stride_token, out_stride_head, stride_table, stride_scale,
    unit, rate, window,
    D: gl.constexpr, D_PAD: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    SIZE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, CODES: gl.constexpr,
    MULTIPLIER_REGISTERS: gl.constexpr, WIDENER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    item_ptr = items_ptr + gl.program_id(0) * 5
    kv_head = gl.program_id(1)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    Q: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VALUES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, D_PAD], Q)
    k_ring = _ring(DTYPE, VALUES, TILE, SIZE, D_PAD, STAGES, 2)
    v_ring = _ring(DTYPE, VALUES, TILE, SIZE, D_PAD, STAGES, 2)
    strides = (q_stride_token, q_stride_head, out_stride_token, out_stride_head)
    if CODES:
        CODE: gl.constexpr = k_desc.dtype
        CODE_LAYOUT: gl.constexpr = k_desc.layout
        codes = _ring(CODE, CODE_LAYOUT, TILE, SIZE, D_PAD, STAGES, 1)
        gl.warp_specialize(
            [
                (multiply_tiles, (q_ptr, out_ptr, sinks_ptr, item_ptr, kv_head, strides, q_tiles, k_ring, v_ring,
                                  unit, rate, window, 0, D, GROUP, TILE, SIZE, STAGES, WINDOW, CAP)),
                (multiply_tiles, (q_ptr, out_ptr, sinks_ptr, item_ptr, kv_head, strides, q_tiles, k_ring, v_ring,
                                  unit, rate, window, 1, D, GROUP, TILE, SIZE, STAGES, WINDOW, CAP)),
                (widen_tiles, (codes, k_ring, v_ring, k_scale_ptr, v_scale_ptr, stride_scale, tables_ptr, stride_table,
                               item_ptr, kv_head, window, TILE, SIZE, D_PAD, STAGES, WINDOW, DTYPE)),
                (load_tiles, (k_desc, v_desc, codes, codes, tables_ptr, stride_table, item_ptr, kv_head, window,
                              TILE, SIZE, STAGES, WINDOW, CODES)),
            ],
            [4, 4, 1],
            [MULTIPLIER_REGISTERS, WIDENER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (q_ptr, out_ptr, sinks_ptr, item_ptr, kv_head, strides, q_tiles, k_ring, v_ring,
                                  unit, rate, window, 0, D, GROUP, TILE, SIZE, STAGES, WINDOW, CAP)),
                (multiply_tiles, (q_ptr, out_ptr, sinks_ptr, item_ptr, kv_head, strides, q_tiles, k_ring, v_ring,
                                  unit, rate, window, 1, D, GROUP, TILE, SIZE, STAGES, WINDOW, CAP)),
                (load_tiles, (k_desc, v_desc, k_ring, v_ring, tables_ptr, stride_table, item_ptr, kv_head, window,
                              TILE, SIZE, STAGES, WINDOW, CODES)),
            ],
            [4, 1],
            [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip


def hopper_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    items: Tensor,
    rules: ScoreRules,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    """Compute attention of query chunks on compute capability 9.0 (Hopper), and write it to `out`.

    The contract is `prefill_attention`.

    Args:
        q: (T, q_heads, D), bfloat16 or float16.
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        block_tables: (sequences, blocks) int32.
        items: work items from `prefill_items` with at most `hopper_tokens` tokens each. Queries outside items are not
            written.
        rules: scale, sliding window, cap and sinks of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
        out: like q.

    Raises:
        ValueError: If `why_not` returns a reason, or dtypes or shapes do not match.
    """
    check_attention(q, k_cache, v_cache, block_tables, rules.sinks, k_scale, v_scale)
    kv_heads, size, dim = k_cache.shape[1:]
    scale, window, soft_cap = rules.scale, rules.window, rules.soft_cap
    reason = why_not(dim, size, window, k_cache.element_size())
    if reason is not None or q.dtype not in DTYPES:
        raise ValueError(reason or f"q is {q.dtype}")
    if not scale > 0:
        raise ValueError(f"the scale of scores is {scale}; it must be greater than 0")
    if len(items):
        _hopper_prefill_kernel[(len(items), kv_heads)](
            q_ptr=q,
            k_desc=_pages(k_cache),
            v_desc=_pages(v_cache),
            tables_ptr=block_tables,
            sinks_ptr=rules.sinks,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            stride_scale=0 if k_scale is None else k_scale.stride(0),
            items_ptr=items,
            out_ptr=out,
            q_stride_token=q.stride(0),
            q_stride_head=q.stride(1),
            out_stride_token=out.stride(0),
            out_stride_head=out.stride(1),
            stride_table=block_tables.stride(0),
            unit=float(soft_cap or scale) * LOG2E.value,
            rate=2.0 * LOG2E.value * scale / (soft_cap or 1.0),
            window=window or 0,
            WINDOW=window is not None,
            CAP=soft_cap is not None,
            **_options(dim, q.shape[1] // kv_heads, size, k_scale is not None),
        )


def _options(dim: int, group: int, size: int, coded: bool) -> dict[str, Any]:
    padded, registers = padded_dim(dim), REGISTERS_OF_CODES if coded else REGISTERS
    return {
        "D": dim,
        "D_PAD": padded,
        "GROUP": group,
        "ROWS": ROWS,
        "TILE": TILE[padded],
        "SIZE": size,
        "STAGES": STAGES,
        "CODES": coded,
        "MULTIPLIER_REGISTERS": registers.multiplier,
        "WIDENER_REGISTERS": registers.widener,
        "LOADER_REGISTERS": registers.loader,
        "num_warps": 4,
        "maxnreg": registers.launched,
    }


def _pages(cache: Tensor) -> TensorDescriptor:
    # One copy moves one page of one KV head, zero-padded to the padded head size
    page = [1, 1, cache.shape[2], padded_dim(cache.shape[3])]
    size = cache.element_size()
    layout = gl.NVMMASharedLayout(min(128, page[3] * size), 8 * size, 4)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), page, layout)
