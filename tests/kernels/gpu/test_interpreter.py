"""Sums, products and comparisons of two types, as Triton has them: also where the interpreter takes a short cut."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def _both(x_ptr, y_ptr, sum_ptr, product_ptr, less_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(sum_ptr + at, x + y)
    tl.store(product_ptr + at, x * y)
    tl.store(less_ptr + at, (x < y).to(tl.int32))


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.int32, torch.float32),
        (torch.int32, torch.int64, torch.int64),
        (torch.uint8, torch.int32, torch.int32),
    ],
)
def test_operands_become_one_type_first(
    device: str, left: torch.dtype, right: torch.dtype, common: torch.dtype
) -> None:
    """The second time, too. Of numbers beyond 2²⁴ float32 has every second one."""
    generator = torch.Generator().manual_seed(1)
    large = 1 << 24 if torch.int32 in (left, right) and left != torch.uint8 else 100
    x = torch.randint(large, large + 4, (SIZE,), generator=generator).to(left)
    y = torch.randint(large, large + 4, (SIZE,), generator=generator).to(right)
    x, y = x.to(device), y.to(device)
    for _ in range(2):
        total, product = torch.empty(SIZE, dtype=common), torch.empty(SIZE, dtype=common)
        total, product = total.to(device), product.to(device)
        less = torch.empty(SIZE, dtype=torch.int32, device=device)
        _both[(1,)](x, y, total, product, less, SIZE)
        assert torch.equal(total, x.to(common) + y.to(common))
        assert torch.equal(product, x.to(common) * y.to(common))
        assert torch.equal(less, (x.to(common) < y.to(common)).int())
