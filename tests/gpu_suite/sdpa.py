"""torch's scaled_dot_product_attention over a contiguous copy of a paged cache, the best case for it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.gpu_suite.paged import Paged
from tests.suite.clock import Call

NAME = "torch SDPA"


def decode(paged: Paged, q: Tensor) -> Call:
    """The heads of a group as queries, as it likes them best."""
    heads = paged.heads
    k, v = paged.contiguous()
    grouped = q.reshape(len(q), heads.kv, heads.q // heads.kv, heads.dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(grouped, k, v, scale=heads.scale)


def prefill(paged: Paged, q: Tensor, queries: int) -> Call:
    """→ (count, heads, queries, D)."""
    heads = paged.heads
    k, v = paged.contiguous()
    asked = q.reshape(-1, queries, heads.q, heads.dim).transpose(1, 2)
    sdpa, whole = torch.nn.functional.scaled_dot_product_attention, queries == k.shape[2]
    if whole:
        return lambda: sdpa(asked, k, v, is_causal=True, scale=heads.scale, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    # A bias and GQA do not go together
    wide_k, wide_v = (t.repeat_interleave(heads.q // heads.kv, 1) for t in (k, v))
    bias = causal_lower_right(queries, k.shape[2])
    return lambda: sdpa(asked, wide_k, wide_v, bias, scale=heads.scale)


def rows(result: Tensor) -> Tensor:
    """(count, heads, queries, D) → (tokens, heads, D)."""
    return result.transpose(1, 2).reshape(-1, result.shape[1], result.shape[3])
