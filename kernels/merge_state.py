"""Merges attention over parts of the keys into attention over all keys."""

from __future__ import annotations

import torch
from torch import Tensor


def check_merge_state(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `merge_state_reference` accepts."""
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ValueError(f"outs are {tuple(outs.shape)}, their log-sum-exps {tuple(lses.shape)}")
    if lses.dtype != torch.float32:
        raise ValueError(f"log-sum-exps are {lses.dtype}, not float32")
    if sinks is not None and sinks.shape != outs.shape[2:3]:
        raise ValueError(f"sinks are {tuple(sinks.shape)}, there are {outs.shape[2]} heads")


def merge_state_reference(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention over P parts of the keys into attention over all keys.

    Each part is weighted by its log-sum-exp; see Juravsky et al., 2024, "Hydragen".

    Args:
        outs: (P, T, heads, D), the attention output over each part of the keys.
        lses: (P, T, heads) float32, the natural log-sum-exp of each part's scores. If it is -inf, the query sees no key
            of the part, and its `outs` are ignored.
        sinks: (heads,), a score without a value that is added once to each softmax; None: no sinks.

    Returns:
        The output (T, heads, D) in outs' dtype, zeros for a query without keys, and its log-sum-exp (T, heads) float32.
    """
    check_merge_state(outs, lses, sinks)
    empty = lses == float("-inf")
    scores = lses if sinks is None else torch.cat((lses, sinks.float().expand(1, *lses.shape[1:])))
    total = scores.logsumexp(0)
    weights = (lses - total.masked_fill(total == float("-inf"), 0.0)).exp()
    merged = (outs.float().masked_fill(empty[..., None], 0.0) * weights[..., None]).sum(0)
    return merged.to(outs.dtype), total
