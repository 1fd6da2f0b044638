"""Causal attention over a paged cache of latents. Cost: batchinfer_kernels.cost.latent_attention_cost.

A program has some heads of one query: what it reads of a token serves all of them, as key and as value. A row's sums
run over tiles of its sequence's tokens in order, so its bits do not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import check_same_dtype, check_vectors, unit_columns
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.latent_attention import check_latent_attention

MAX_LATENT = 1024  # values of a token
HEADS = 16  # the fewest rows that a tensor core multiplies
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["table_stride"])
def _latent_attention_kernel(
    q_ptr, cache_ptr, tables_ptr, sequences_ptr, positions_ptr, y_ptr,
    scale, heads, q_token_stride, q_head_stride, block_stride, slot_stride, table_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale` has log2(e) in it. The first RANK values of a token are its value, too; the rest is only key."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    sequence = tl.load(sequences_ptr + token).to(tl.int64)
    length = tl.load(positions_ptr + token).to(tl.int32) + 1
    value, rest = tl.arange(0, RANK_PADDED), RANK + tl.arange(0, REST_PADDED)
    q_ptr += token * q_token_stride + head[:, None] * q_head_stride
    known = head[:, None] < heads
    q = tl.load(q_ptr + value[None, :], mask=known & (value[None, :] < RANK), other=0.0)
    q_rest = tl.load(q_ptr + rest[None, :], mask=known & (rest[None, :] < WIDTH), other=0.0)
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, RANK_PADDED), tl.float32)
    for first in range(0, length, TOKENS):
        at = first + tl.arange(0, TOKENS)
        seen = at < length
        block = tl.load(tables_ptr + sequence * table_stride + at // BLOCK_SIZE, mask=seen, other=0).to(
            tl.int64
        )
        places = cache_ptr + block * block_stride + (at % BLOCK_SIZE) * slot_stride
        latent = tl.load(
            places[:, None] + value[None, :], mask=seen[:, None] & (value[None, :] < RANK), other=0.0
        )
        keys = tl.load(
            places[:, None] + rest[None, :], mask=seen[:, None] & (rest[None, :] < WIDTH), other=0.0
        )
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores += tl.dot(q_rest, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(most - top)
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        total += tl.dot(weights.to(latent.dtype), latent, input_precision=PRECISION)
        most = top
    y_ptr += (token * heads + head[:, None]) * RANK
    found = (total / mass[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + value[None, :], found, mask=known & (value[None, :] < RANK))


def latent_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    scale: float,
    rank: int,
    out: Tensor | None = None,
) -> Tensor:
    """Attend as batchinfer_kernels.latent_attention.latent_attention_reference does; `out`, contiguous, is written if
    given.

    `sequences` and `positions`, (T,) int64: each query's row of the block tables, and where it stands in its sequence.
    Both are read on the device, so that a graph can replay the launch.
    """
    check_latent_attention(q, cache, block_tables, rank)
    check_same_dtype(q=q, cache=cache)
    check_vectors(len(q), torch.int64, sequences=sequences, positions=positions)
    unit_columns(q=q, cache=cache, block_tables=block_tables)
    tokens, heads, width = q.shape
    y = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device) if out is None else out
    if y.shape != (tokens, heads, rank) or not y.is_contiguous():
        raise ValueError(f"out is {tuple(y.shape)}, not {(tokens, heads, rank)}, or not contiguous")
    if not tokens:
        return y
    rank_padded = max(16, next_power_of_2(rank))
    strides = (*q.stride()[:2], cache.stride(0), cache.stride(2), block_tables.stride(0))
    _latent_attention_kernel[(tokens, cdiv(heads, HEADS))](
        q,
        cache,
        block_tables,
        sequences,
        positions,
        y,
        scale * LOG2_E,
        heads,
        *strides,
        WIDTH=width,
        RANK=rank,
        RANK_PADDED=rank_padded,
        REST_PADDED=max(16, next_power_of_2(max(1, width - rank))),
        BLOCK_SIZE=cache.shape[2],
        TOKENS=16 if q.dtype == torch.float32 else 32,
        HEADS=HEADS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # matters for float32 only
        num_warps=8 if rank_padded > 256 else 4,
        num_stages=2,
    )
    return y
