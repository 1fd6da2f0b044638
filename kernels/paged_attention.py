"""Attention of query chunks over a paged KV cache: one operator for prefill, chunked prefill and decode.

Attention is causal, or bidirectional for encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from batchinfer_kernels.arithmetic import CacheDtype
from batchinfer_kernels.draft_tree import TreeMask

_Given = ParamSpec("_Given")
# The largest quantised value, by the cache's dtype
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
CODES: dict[CacheDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """How a layer computes attention scores from products of queries and keys.

    Attributes:
        scale: factor of q · k.
        window: maximum number of keys that a query sees, its own included; None: all.
        soft_cap: scaled scores s become soft_cap × tanh(s / soft_cap) (Gemma 2); None: no cap.
        sinks: (q_heads,), a score without a value that is added to each softmax (gpt-oss); None: no sinks.
        bias: (q_heads, 2 × positions) float32, added to scaled scores. The bias at index positions + d applies to a key
            d positions after its query (MPNet). None: no bias.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None


def check_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes that `paged_attention_lse_reference` accepts."""
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or q.dim() != 3:
        raise ValueError(f"q {tuple(q.shape)}, caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(k_cache.shape)}")
    if block_tables.dim() != 2:
        raise ValueError(f"block tables are (sequences, blocks), got {tuple(block_tables.shape)}")


def check_attention_extras(
    q: Tensor, k_cache: Tensor, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Raise ValueError unless sinks and scales match the heads of q and the cache.

    Args:
        q: (T, q_heads, D).
        k_cache: (blocks, kv_heads, block_size, D).
        sinks: (q_heads,), the attention sinks, or None.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
    """
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks are {tuple(sinks.shape)}, there are {q.shape[1]} query heads")
    check_scales(k_cache, k_scale, v_scale)


def check_bias(bias: Tensor, q_heads: int) -> None:
    """Raise ValueError unless the bias of attention scores has a row per query head, and an even number of columns."""
    if bias.dim() != 2 or len(bias) != q_heads or bias.shape[1] % 2:
        raise ValueError(f"bias is {tuple(bias.shape)}, expected ({q_heads}, twice the positions)")


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError unless a quantised cache has one float32 scale per token and head, and any other cache none."""
    for scale in (k_scale, v_scale):
        if (scale is None) != (k_cache.dtype not in LARGEST_CODE):
            raise ValueError(f"a cache of {k_cache.dtype} has {'no' if scale is None else 'a'} scale")
        if scale is not None and (scale.shape != k_cache.shape[:3] or scale.dtype != torch.float32):
            found = f"{tuple(scale.shape)} {scale.dtype}"
            raise ValueError(f"scales are {found}, expected {tuple(k_cache.shape[:3])} float32")


def gather_cached(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the cached keys or values of a sequence's first `length` tokens: (kv_heads, length, D).

    Args:
        cache: (blocks, kv_heads, block_size, D); or scales without D, and then the result has no D.
        table: block numbers of the sequence.
        length: number of tokens to return.
    """
    pages = cache[table.long()]  # (blocks, kv_heads, block_size, D)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def gather_values(cache: Tensor, scale: Tensor | None, table: Tensor, length: int) -> Tensor:
    """Return the keys or values of a sequence's first `length` tokens, dequantised: (kv_heads, length, D) float32.

    Args:
        cache: (blocks, kv_heads, block_size, D).
        scale: (blocks, kv_heads, block_size), or None for a cache that is not quantised.
        table: block numbers of the sequence.
        length: number of tokens to return.
    """
    values = gather_cached(cache, table, length).float()
    return values if scale is None else values * gather_cached(scale, table, length)[..., None]


def paged_attention_lse_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    rules: ScoreRules,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    tree: TreeMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over a paged KV cache in float32. All other implementations must match this one.

    Blocks entirely before the window of a sequence's first query are not read.

    Args:
        q: (T, q_heads, D), the queries of all sequences in order.
        k_cache: (blocks, kv_heads, block_size, D). An int8 or float8_e4m3fn cache holds rounded k / k_scale.
        v_cache: as k_cache.
        block_tables: (sequences, blocks) int32.
        query_lens: number of queries of each sequence, which are its last tokens.
        context_lens: number of keys of each sequence, queries included.
        rules: scale, sliding window, cap, sinks and bias of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as k_scale.
        causal: False if queries also see later keys; a window then limits the distance on both sides.
        tree: the keys that queries see in a step with draft trees; there must be no window. None: all keys up to their
            own.

    Returns:
        The output (T, q_heads, D) in q's dtype, zeros for a query without keys; and the natural log-sum-exp (T,
        q_heads) float32 of each softmax, sinks included, -inf for a query without keys.
    """
    check_paged_attention(q, k_cache, v_cache, block_tables)
    window, soft_cap = rules.window, rules.soft_cap
    check_attention_extras(q, k_cache, rules.sinks, k_scale, v_scale)
    if tree is not None and (window is not None or not causal):
        raise ValueError("a draft tree requires causal attention without a window")
    out, start = torch.empty_like(q), 0
    lse = torch.empty(q.shape[:2], device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for i, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = slice(start, start + queries)
        start += queries
        k = gather_values(k_cache, k_scale, block_tables[i], context).repeat_interleave(group, 0)
        v = gather_values(v_cache, v_scale, block_tables[i], context).repeat_interleave(group, 0)
        if window is not None:
            left = max(0, context - queries - window + 1)
            k[:, :left], v[:, :left] = 0, 0  # 0 × NaN is NaN
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), k) * rules.scale
        if rules.bias is not None:
            scores = scores + bias_of(rules.bias, *_places(queries, context))
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if tree is None:
            hidden = _hidden(*_places(queries, context), window, causal)
        else:
            hidden = ~torch.from_numpy(tree.seen(start - queries, start, context))
        scores = scores.masked_fill(hidden.to(q.device), float("-inf"))
        weights, sums = _softmax(scores, rules.sinks)
        out[rows], lse[rows] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype), sums.T
    return out, lse


def _first(function: Callable[_Given, tuple[Tensor, Tensor]]) -> Callable[_Given, Tensor]:
    @wraps(function)
    def first(*given: _Given.args, **named: _Given.kwargs) -> Tensor:
        return function(*given, **named)[0]

    return first


paged_attention_reference = _first(paged_attention_lse_reference)


def _places(queries: int, context: int) -> tuple[Tensor, Tensor]:
    return torch.arange(context - queries, context)[:, None], torch.arange(context)[None]


def bias_of(bias: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Return the bias of each (query, key) pair: (q_heads, *shape of key_at - query_at).

    Args:
        bias: (q_heads, 2 × positions), as in ScoreRules.
        query_at: positions of queries.
        key_at: positions of keys, of a shape that broadcasts with that of `query_at`.
    """
    distances = (key_at - query_at).to(bias.device)
    return bias[:, bias.shape[1] // 2 + distances]


def _hidden(query_at: Tensor, key_at: Tensor, window: int | None, causal: bool) -> Tensor:
    hidden = (key_at > query_at) & causal
    if window is None:
        return hidden
    return hidden | (key_at <= query_at - window) | (key_at >= query_at + window)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights, sums = _softmax(torch.cat((scores, column), -1), None)
        return weights[..., :-1], sums
    sums = scores.logsumexp(-1)
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0), sums
