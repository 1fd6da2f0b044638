"""Products with low-rank factors (LoRA; Hu et al., 2021), each row with those of its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from batchinfer_kernels.matmul import products


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """A step's tokens sorted by their adapter, those without one first. The host waits for nothing."""

    order: Tensor  # (T,) int64: tokens
    places: Tensor  # (T,) int64: where in `order` each token stands
    starts: Tensor  # (adapters + 2,) int64: where the tokens of each number begin in `order`; at last T

    @classmethod
    def of(cls, adapters: Tensor, count: int) -> AdaptedRows:
        """adapters: (T,) int64, the number of each token's adapter from 1 to `count`, or 0."""
        found, order = adapters.sort(stable=True)
        each = torch.arange(len(order), device=order.device)
        places = torch.empty_like(order).scatter_(0, order, each)
        return cls(order, places, torch.searchsorted(found, torch.arange(count + 2, device=order.device)))


def low_rank_reference(
    x: Tensor, factors: Sequence[tuple[Tensor, Tensor] | None], starts: Tensor, outputs: int
) -> Tensor:
    """x: (R, K); factors: of each adapter A (r, K) and B (outputs, r) of x's dtype, r its own, or None; starts:
    (adapters + 1,) int64 from 0 to R → (R, outputs) float32.

    Row r gets B A x of adapter e where starts[e] ≤ r < starts[e + 1]; 0 where that is None. A x is rounded to x's
    dtype. Raises ValueError when shapes or dtypes do not fit.
    """
    check_low_rank(x, factors, starts, outputs)
    y = torch.zeros(len(x), outputs, dtype=torch.float32, device=x.device)
    for own, (first, end) in zip(factors, pairwise(starts.tolist()), strict=True):
        if own is not None and first < end:
            a, b = own
            y[first:end] = products(products(x[first:end], a).to(x.dtype), b)
    return y


def check_low_rank(
    x: Tensor, factors: Sequence[tuple[Tensor, Tensor] | None], starts: Tensor, outputs: int
) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, not a matrix of floats")
    if starts.shape != (len(factors) + 1,) or starts.dtype != torch.int64:
        raise ValueError(
            f"starts are {tuple(starts.shape)} {starts.dtype}, there are {len(factors)} adapters"
        )
    for own in factors:
        if own is None:
            continue
        a, b = own
        fit = a.dim() == b.dim() == 2 and a.shape[1] == x.shape[1] and b.shape == (outputs, len(a))
        if not fit or len(a) == 0:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise ValueError(f"factors are {shapes}, x is {tuple(x.shape)}, and there are {outputs} outputs")
        if a.dtype != x.dtype or b.dtype != x.dtype:
            raise ValueError(f"factors are {a.dtype} and {b.dtype}, x is {x.dtype}")
