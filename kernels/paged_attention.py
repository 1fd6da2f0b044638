"""Causal attention of query chunks over a paged KV cache: prefill, chunked prefill and decode are one operator."""

from __future__ import annotations

import torch
from torch import Tensor


def check_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor) -> None:
    """Raises ValueError when shapes do not fit."""
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or q.dim() != 3:
        raise ValueError(f"q {tuple(q.shape)}, caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(k_cache.shape)}")
    if block_tables.dim() != 2:
        raise ValueError(f"block tables are (sequences, blocks), got {tuple(block_tables.shape)}")


def gather_cached(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of one sequence: (kv_heads, length, D)."""
    pages = cache[table.long()]  # (blocks, kv_heads, block_size, D)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention in float32, one sequence after the other: slow, and what every other implementation must equal.

    q: (T, q_heads, D), the sequences' query chunks one after the other; caches: (blocks, kv_heads, block_size, D);
    block_tables: (sequences, max blocks) int32; context_lens: cached tokens of each sequence, this chunk's
    included, so that its queries stand at positions context - query … context - 1. `window`: a query sees at most
    so many keys, its own included. Returns (T, q_heads, D) in q's dtype.
    """
    check_paged_attention(q, k_cache, v_cache, block_tables)
    out, start = torch.empty_like(q), 0
    group = q.shape[1] // k_cache.shape[1]
    for i, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = slice(start, start + queries)
        start += queries
        k, v = (gather_cached(c, block_tables[i], context).float() for c in (k_cache, v_cache))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), k) * scale
        query_at = torch.arange(context - queries, context)[:, None]
        key_at = torch.arange(context)[None]
        hidden = key_at > query_at
        if window is not None:
            hidden = hidden | (key_at <= query_at - window)
        probabilities = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,hkd->qhd", probabilities, v).to(q.dtype)
    return out
