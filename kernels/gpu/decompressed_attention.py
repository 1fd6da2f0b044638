"""Causal attention of prompts with K and V of each head, computed from latents for one step.

Cost: batchinfer_kernels.cost.decompressed_attention_cost. A program computes some tokens of one head (FlashAttention-2,
Dao, 2023). The rotated part of a key, which all heads share, is not copied per head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.attention_core import as_part
from batchinfer_kernels.gpu.attention_launch import KVTiles
from batchinfer_kernels.gpu.checks import unit_columns
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.gpu.target import architecture
from batchinfer_kernels.latent_attention import check_decompressed_attention

LOG2_E = 1.4426950408889634
# For up to 128 16-bit values per head. Tiles are smaller if tensor cores read operands from registers. All compile
# without spilling; none was measured
_TILES = {"80": KVTiles(64, 32, 4, 3), "90": KVTiles(128, 64, 8, 3), "100": KVTiles(128, 64, 8, 3)}
_SINGLE = KVTiles(16, 32, 4, 2)
_AMD = KVTiles(64, 32, 4, 1)


@triton.jit
def _attend_keys(
    total, top, mass, q, q_shared, row_at, k_ptr, v_ptr, shared_ptr, k_stride, v_stride, shared_stride,
    first, end, scale,
    DIM: tl.constexpr, V_DIM: tl.constexpr, SHARED: tl.constexpr,
    DIM_PADDED: tl.constexpr, V_PADDED: tl.constexpr, SHARED_PADDED: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,  # the span is whole tiles, and every row sees all of it
):  # fmt: skip
    dim, v_dim, shared_dim = tl.arange(0, DIM_PADDED), tl.arange(0, V_PADDED), tl.arange(0, SHARED_PADDED)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        inside = key < end
        k_seen, v_seen, shared_seen = (
            (dim < DIM)[None, :],
            (v_dim < V_DIM)[None, :],
            (shared_dim < SHARED)[None, :],
        )
        if not WHOLE:
            k_seen, v_seen, shared_seen = (
                inside[:, None] & k_seen, inside[:, None] & v_seen, inside[:, None] & shared_seen,
            )  # fmt: skip
        at = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * k_stride + dim[None, :], mask=k_seen, other=0.0)
        shared = tl.load(shared_ptr + at * shared_stride + shared_dim[None, :], mask=shared_seen, other=0.0)
        scores = tl.dot(q_shared, tl.trans(shared), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
        if not WHOLE:
            scores = tl.where(inside[None, :] & (key[None, :] <= row_at[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # padding rows
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + at * v_stride + v_dim[None, :], mask=v_seen, other=0.0)
        total = tl.dot(weights.to(q.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    return total, top, mass


@triton.jit
def _decompressed_attention_kernel(
    q_ptr, k_ptr, v_ptr, shared_ptr,
    items_ptr,  # (n, 5) int32: first key, first row of q, rows, position of the first row, end of the keys
    out_ptr, q_stride_token, q_stride_head, k_stride_head, k_stride, v_stride_head, v_stride, shared_stride,
    out_stride_token, out_stride_head, scale,
    DIM: tl.constexpr, V_DIM: tl.constexpr, SHARED: tl.constexpr,
    DIM_PADDED: tl.constexpr, V_PADDED: tl.constexpr, SHARED_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # scale includes log2(e)
    item, head = items_ptr + tl.program_id(0) * 5, tl.program_id(1).to(tl.int64)
    first_key, first_row = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
    tokens, first_at, end = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    row = tl.arange(0, ROWS)
    real = row < tokens
    row_at = tl.where(real, first_at + row, -1)
    dim, v_dim, shared_dim = tl.arange(0, DIM_PADDED), tl.arange(0, V_PADDED), tl.arange(0, SHARED_PADDED)
    q_ptr += (first_row + row)[:, None] * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + dim[None, :], mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    turned = real[:, None] & (shared_dim < SHARED)[None, :]
    q_shared = tl.load(q_ptr + DIM + shared_dim[None, :], mask=turned, other=0.0)
    k_ptr += head * k_stride_head + first_key * k_stride
    v_ptr += head * v_stride_head + first_key * v_stride
    shared_ptr += first_key * shared_stride
    total = tl.zeros([ROWS, V_PADDED], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    whole = (first_at + 1) // TILE * TILE  # every row sees all keys up to the first row's position
    total, top, mass = _attend_keys(
        total, top, mass, q, q_shared, row_at, k_ptr, v_ptr, shared_ptr, k_stride, v_stride, shared_stride,
        0, whole, scale,
        DIM, V_DIM, SHARED, DIM_PADDED, V_PADDED, SHARED_PADDED, TILE, PRECISION, True,
    )  # fmt: skip
    total, top, mass = _attend_keys(
        total, top, mass, q, q_shared, row_at, k_ptr, v_ptr, shared_ptr, k_stride, v_stride, shared_stride,
        whole, end, scale,
        DIM, V_DIM, SHARED, DIM_PADDED, V_PADDED, SHARED_PADDED, TILE, PRECISION, False,
    )  # fmt: skip
    found, _ = as_part(total, top, mass)
    out_at = (first_row + row)[:, None] * out_stride_token + head * out_stride_head + v_dim[None, :]
    cells = real[:, None] & (v_dim < V_DIM)[None, :]
    tl.store(out_ptr + out_at, found.to(out_ptr.dtype.element_ty), mask=cells)


def decompressed_tokens(dtype: torch.dtype) -> int:
    """Return the maximum number of query tokens of a work item of `decompressed_attention`.

    It is the argument `tokens_per_item` of `prefill_items`.
    """
    return _tiles(architecture(), dtype).rows


def decompressed_attention(
    q: Tensor, k: Tensor, v: Tensor, shared: Tensor, items: Tensor, scale: float, out: Tensor
) -> None:
    """Compute causal attention with K and V of every head that were computed from latents, and write it to `out`.

    The contract is `decompressed_attention_reference`, for the queries in `items`.

    Args:
        q: (T, heads, P + R), queries; P values are multiplied by `k` and R by `shared`.
        k: (heads, N, P), the part of the keys that differs between heads, for the N keys of all sequences.
        v: (heads, N, V), the values.
        shared: (N, R), the rotated part of the keys, which all heads share.
        items: (n, 5) int32, work items: index of the sequence's first key in `k`, first row of q, number of rows,
            position of the first row in its sequence, and end of the keys that the rows see. They are made by
            `prefill_items` with `decompressed_tokens`, and the first field is replaced.
        scale: factor of q · k.
        out: (T, heads, V) in q's dtype. Rows outside items are not written.

    Raises:
        ValueError: If shapes or dtypes do not match, or the scale is not greater than 0.
    """
    check_decompressed_attention(q, k, v, shared)
    unit_columns(q=q, k=k, v=v, shared=shared, out=out)
    if out.shape != (*q.shape[:2], v.shape[2]) or out.dtype != q.dtype:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, q {tuple(q.shape)}, v {tuple(v.shape)}")
    if not scale > 0:
        raise ValueError(f"the scale of scores is {scale}; it must be greater than 0")
    if not len(items):
        return
    _decompressed_attention_kernel[(len(items), q.shape[1])](
        q,
        k,
        v,
        shared,
        items,
        out,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        shared.stride(0),
        *out.stride()[:2],
        scale * LOG2_E,
        **_options(architecture(), q.dtype, k.shape[2], v.shape[2], shared.shape[1]),
    )


@cache
def _tiles(arch: str, dtype: torch.dtype) -> KVTiles:
    if arch.startswith("gfx"):
        return _AMD
    return _SINGLE if dtype == torch.float32 else _TILES.get(arch, _TILES["80" if arch else "90"])


@cache
def _options(arch: str, dtype: torch.dtype, dim: int, v_dim: int, shared: int) -> dict[str, Any]:
    tiles = _tiles(arch, dtype)
    return {
        "DIM": dim,
        "V_DIM": v_dim,
        "SHARED": shared,
        "DIM_PADDED": max(16, next_power_of_2(dim)),
        "V_PADDED": max(16, next_power_of_2(v_dim)),
        "SHARED_PADDED": max(16, next_power_of_2(shared)),
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        # float32 as three products of tensor cores; without them the kernel spills
        "PRECISION": "tf32x3" if arch.isdigit() else "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
