"""Causal attention over a paged cache of latents (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1).

The cache keeps one vector per token for all heads. The whole vector is K, and its first part is V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.rope_store import rotate_reference


def check_latent_attention(q: Tensor, cache: Tensor, block_tables: Tensor, rank: int) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `latent_attention_reference` accepts."""
    if q.dim() != 3 or cache.dim() != 4 or cache.shape[1] != 1 or q.shape[2] != cache.shape[3]:
        raise ValueError(f"q is {tuple(q.shape)}, the cache {tuple(cache.shape)}")
    if q.dtype != cache.dtype or not 0 < rank <= q.shape[2]:
        raise ValueError(f"q is {q.dtype}, the cache {cache.dtype}; V has {rank} of {q.shape[2]} values")
    if block_tables.dim() != 2:
        raise ValueError(f"block tables are (sequences, blocks), got {tuple(block_tables.shape)}")


def latent_attention_reference(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    rank: int,
) -> Tensor:
    """Compute causal attention over a paged cache of latents (MLA), in float32: (T, heads, rank) in q's dtype.

    Args:
        q: (T, heads, D), the queries of all sequences in order.
        cache: (blocks, 1, block_size, D). The D values of a token are its key for every head, the first `rank` its
            value.
        block_tables: (sequences, blocks) int32.
        query_lens: number of queries of each sequence, which are its last tokens.
        context_lens: number of keys of each sequence, queries included.
        scale: factor of q · k.
        rank: number of values of V.
    """
    check_latent_attention(q, cache, block_tables, rank)
    out, start = q.new_empty(*q.shape[:2], rank), 0
    for i, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = slice(start, start + queries)
        start += queries
        keys = cache[block_tables[i].long()].flatten(0, 2)[:context].float()
        scores = torch.einsum("qhd,kd->hqk", q[rows].float(), keys) * scale
        query_at, key_at = torch.arange(context - queries, context), torch.arange(context)
        hidden = (key_at[None] > query_at[:, None]).to(q.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,kd->qhd", weights, keys[:, :rank]).to(q.dtype)
    return out


def check_decompressed_attention(q: Tensor, k: Tensor, v: Tensor, shared: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes of `decompressed_attention_reference`."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or shared.dim() != 2:
        raise ValueError(f"q, k, v and shared have {[one.dim() for one in (q, k, v, shared)]} dimensions")
    if q.shape[1:] != (len(k), k.shape[2] + shared.shape[1]) or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if len(shared) != k.shape[1] or {k.dtype, v.dtype, shared.dtype} != {q.dtype}:
        raise ValueError(f"shared is {tuple(shared.shape)}; q is {q.dtype}, k {k.dtype}, v {v.dtype}")


def decompressed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """Compute causal attention in float32, with K and V of every head that were computed from latents (MLA).

    Args:
        q: (T, heads, P + R), the queries of all sequences; P values are multiplied by `k` and R by `shared`.
        k: (heads, N, P), the part of the keys that differs between heads, for the N keys of all sequences.
        v: (heads, N, V), the values.
        shared: (N, R), the rotated part of the keys, which all heads share.
        query_lens: number of queries of each sequence, which are its last tokens.
        context_lens: number of keys of each sequence, queries included.
        scale: factor of q · k.

    Returns:
        (T, heads, V) in q's dtype.
    """
    check_decompressed_attention(q, k, v, shared)
    out, start, first = q.new_empty(*q.shape[:2], v.shape[2]), 0, 0
    whole = torch.cat((k, shared.expand(len(k), -1, -1)), -1).float()
    for queries, context in zip(query_lens, context_lens, strict=True):
        rows, keys = slice(start, start + queries), slice(first, first + context)
        start, first = rows.stop, keys.stop
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), whole[:, keys]) * scale
        hidden = torch.ones(queries, context, device=q.device).tril(context - queries) == 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,hkd->qhd", weights, v[:, keys].float()).to(q.dtype)
    return out


def latent_store_reference(
    q: Tensor,
    latent: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate q and k by their positions (RoPE), and write each latent followed by its k to the cache, in place.

    Args:
        q: (T, heads, R), the part of the queries to rotate.
        latent: (T, rank).
        k: (T, R), the part of the keys to rotate, which all heads share.
        cos: (T, R / 2) float32, for the position of each token.
        sin: as `cos`.
        cache: (blocks, 1, block_size, rank + R).
        slots: (T,) int64, the slot of each token: block * block_size + offset.
        interleaved: which values form a pair; see `rotate_reference`.

    Returns:
        The rotated q, (T, heads, R).
    """
    turned = rotate_reference(k[:, None], cos, sin, interleaved)[:, 0]
    cache.view(-1, cache.shape[3]).index_copy_(0, slots, torch.cat((latent, turned), -1))
    return rotate_reference(q, cos, sin, interleaved)
