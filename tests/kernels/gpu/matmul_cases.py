"""Helpers for tests of matrix products: operands next to NaN, all ways to multiply, launches for the
compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import block_fp8_matmul_reference
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference, quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import target
from batchinfer_kernels.gpu.block_fp8_matmul import block_fp8_matmul
from batchinfer_kernels.gpu.fp8_matmul import fp8_matmul
from batchinfer_kernels.gpu.int8_matmul import int8_matmul
from batchinfer_kernels.gpu.matmul import matmul
from batchinfer_kernels.gpu.quantized_matmul import int4_weight_matmul
from batchinfer_kernels.matmul import finish_product, matmul_reference
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.quantized_matmul import (
    int4_weight_matmul_reference,
)
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.float8_sums import float8_rounding
from tests.kernels.rounded_weights import quantize_blocks_fp8, quantize_int4

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rounding to the dtype, of values up to the largest: half a unit in the last place, and sums in another order
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# Ways to multiply; int8 has no option `deterministic`
WAYS = ("plain", "int4_32", "int4_64", "int4_128", "int4_64_zeros", "fp8", "block_fp8", "int8")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def near(got: Tensor, wanted: Tensor, name: str = "") -> None:
    """Assert that results are close.

    Args:
        name: the way to multiply, which sets the tolerance.
    """
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    rounding = float8_rounding() if name in ("fp8", "block_fp8") else 0.0
    largest = float(wanted.abs().amax()) if wanted.numel() else 0.0
    torch.testing.assert_close(
        got, wanted, atol=(TOLERANCE[wanted.dtype] + rounding) * largest, rtol=0.0, equal_nan=False
    )


def beside_nan(values: Tensor) -> Tensor:
    """Return an equal matrix with NaN before it, after each row and below it. Strides are no multiple of 16
    bytes."""
    rows, columns = values.shape
    around = torch.full((rows + 2, columns + 5), float("nan"), device=values.device).to(values.dtype)
    around[1 : rows + 1, 2 : columns + 2] = values
    return around[1 : rows + 1, 2 : columns + 2]


@dataclass(frozen=True)
class Way:
    """A way to multiply x with a weight [N, K] of its dtype."""

    multiply: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    weight: tuple[Any, ...]

    def __call__(self, x: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        return self.multiply(x, *self.weight, bias, **options)

    def wanted(self, x: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        return self.reference(x, *self.weight, bias, **options)


def way(name: str, weight: Tensor) -> Way:
    """Return a way to multiply with a weight.

    Args:
        name: one of WAYS, which sets the quantisation.
    """
    if name == "plain":
        return Way(matmul, matmul_reference, (weight,))
    if name == "fp8":
        return Way(fp8_matmul, fp8_matmul_reference, quantize_rows_fp8(weight))
    if name == "block_fp8":
        return Way(block_fp8_matmul, block_fp8_matmul_reference, (quantize_blocks_fp8(weight, 48),))
    if name == "int8":
        transformed = {"hadamard": True}
        coded = quantize_weight(weight, True)
        return Way(partial(int8_matmul, **transformed), partial(int8_reference, **transformed), coded)
    quantized = quantize_int4(weight, int(name.split("_")[1]), symmetric=not name.endswith("zeros"))
    return Way(int4_weight_matmul, int4_weight_matmul_reference, (quantized,))


def int8_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    hadamard: bool = False,
) -> Tensor:
    """Return quantized_linear_reference of float32 inputs, with the final activation, in `out_dtype`."""
    sums = quantized_linear_reference(x.float(), codes, scales, bias, hadamard)
    return finish_product(sums, None, out_dtype or x.dtype, activation)


# ---- launches for the compiler: arguments are JSON's types


@contextmanager
def processors_of(count: int) -> Iterator[None]:
    """Make launches like a GPU's with this number of processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "processors", lambda _device: count)
        yield


def launch_way(
    name: str,
    dtype: str,
    rows: int,
    outputs: int,
    inputs: int,
    deterministic: bool,
    activation: Activation | None,
    processors: int,
) -> None:
    """Launch the kernel that a GPU with this number of processors would launch."""
    weight = torch.zeros(outputs, inputs, dtype=getattr(torch, dtype))
    x = torch.zeros(rows, inputs, dtype=weight.dtype)
    options: dict[str, Any] = {} if name == "int8" else {"deterministic": deterministic}
    with processors_of(processors):
        way(name, weight)(x, weight[:, 0].contiguous(), activation=activation, **options)
