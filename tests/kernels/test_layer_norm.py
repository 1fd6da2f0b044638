"""Tests that LayerNorm gives a row equal bits in any batch, at any position, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.layer_norm import layer_norm_reference
from tests.kernels.cpu_kit import DTYPES, operators, threads_of

Norm = Callable[[Tensor, Tensor, Tensor | None, float, Tensor | None], tuple[Tensor, Tensor]]
ROWS = 130
# Shorter than a vector, around its multiples, odd, and beyond what torch sums at once (64 vectors)
WIDTHS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 100, 127, 255, 257, 577, 1025, 2049)


def drawn(width: int, dtype: torch.dtype, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias and residual; rows are far from 0: their mean takes up the significant bits."""
    generator = torch.Generator().manual_seed(width)
    shape = (width,) if heads is None else (heads, width)
    x, residual = (torch.randn(ROWS, *shape, generator=generator) * 3 + 5 for _ in range(2))
    weight, bias = (torch.randn(shape, generator=generator) for _ in range(2))
    x[7] *= 100
    return x.to(dtype), weight.to(dtype), bias.to(dtype), residual.to(dtype)


def check(
    norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, starts: range
) -> None:
    def normed(start: int, stop: int) -> tuple[Tensor, Tensor]:
        beside = None if residual is None else residual[start:stop].clone()
        return norm(x[start:stop].clone(), weight, bias, 1e-5, beside)

    with threads_of(1):
        alone = [torch.cat(parts) for parts in zip(*(normed(i, i + 1) for i in range(ROWS)), strict=True)]
    for start in starts:
        for part, wanted in zip(normed(start, ROWS), alone, strict=True):
            assert torch.equal(part, wanted[start:]), f"rows from {start} on"
        for part, wanted in zip(normed(0, start + 1), alone, strict=True):
            assert torch.equal(part, wanted[: start + 1]), f"{start + 1} rows"


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, width: int) -> None:
    x, weight, bias, residual = drawn(width, dtype)
    with threads_of(2):
        for norm in (layer_norm_reference, operators(None).layer_norm):
            check(norm, x, weight, bias, residual, range(0, ROWS, 7))
            check(norm, x, weight, None, None, range(0, ROWS, 13))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 20, 33, 64, 129])
def test_nor_do_the_heads_of_a_row(dtype: torch.dtype, width: int) -> None:
    x, weight, bias, _ = drawn(width, dtype, heads=3)
    with threads_of(2):
        check(layer_norm_reference, x, weight, bias, None, range(0, ROWS, 7))
        check(layer_norm_reference, x, weight, None, None, range(0, ROWS, 13))
