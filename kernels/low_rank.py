"""Products with low-rank factors (LoRA; Hu et al., 2021), with the adapter of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from batchinfer_kernels.matmul import products


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """The T tokens of a step sorted by LoRA adapter; tokens without an adapter come first.

    Attributes:
        order: (T,) int64, the index of each sorted token in the step.
        places: (T,) int64, the index of each token of the step in `order`.
        starts: (adapters + 2,) int64, the index in `order` of the first token without adapter (0), of the first token
            of each adapter, and T at the end.
    """

    order: Tensor
    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, adapters: Tensor, count: int) -> AdaptedRows:
        """Sort the T tokens of a step by adapter. The host does not wait for a GPU.

        Args:
            adapters: (T,) int64, the adapter number of each token from 1 to `count`, or 0 for none.
            count: number of adapters.
        """
        found, order = adapters.sort(stable=True)
        each = torch.arange(len(order), device=order.device)
        places = torch.empty_like(order).scatter_(0, order, each)
        return cls(order, places, torch.searchsorted(found, torch.arange(count + 2, device=order.device)))


def low_rank_reference(
    x: Tensor, factors: Sequence[tuple[Tensor, Tensor] | None], starts: Tensor, outputs: int
) -> Tensor:
    """Return the LoRA product B A x of each row's adapter: (R, outputs) float32.

    Row r uses adapter e if starts[e] ≤ r < starts[e + 1]. A x is rounded to x's dtype. A row whose adapter has no
    factors gets zeros.

    Args:
        x: (R, K), rows sorted by adapter.
        factors: for each adapter, A (r, K) and B (outputs, r) of x's dtype; None: it has no factors. Ranks r may
            differ.
        starts: (adapters + 1,) int64, the first row of each adapter, and R at the end.
        outputs: number of rows of B.

    Raises:
        ValueError: If shapes or dtypes do not match.
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
    """Raise ValueError unless the tensors have the shapes and dtypes that `low_rank_reference` accepts."""
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
