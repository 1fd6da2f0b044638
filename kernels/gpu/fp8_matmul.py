"""Linear layers on float8_e4m3fn values in both factors. Cost: batchinfer_kernels.cost.fp8_linear_cost.

The kernel is matmul_core.matmul_kernel. matmul.py defines `deterministic`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.fp8_matmul import check_fp8_matmul
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.matmul_core import Operands, multiply
from batchinfer_kernels.gpu.quantize_rows import quantize_rows_fp8
from batchinfer_kernels.gpu.target import architecture

# The first compute capability with tensor cores for float8_e4m3fn
FIRST_WITH_FP8 = 89


def why_not_fp8() -> str | None:
    """Return the reason why this GPU cannot multiply float8_e4m3fn; None if it can, or if kernels are interpreted."""
    found = architecture()
    if found == "" or (found.isdigit() and int(found) >= FIRST_WITH_FP8):
        return None
    if found.isdigit():
        return f"float8_e4m3fn needs compute capability 8.9 or newer, this GPU has {found[:-1]}.{found[-1]}"
    return f"float8_e4m3fn is not supported by the matrix cores of {found}"


def fp8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return x W^T + bias for a float8_e4m3fn weight: (T, N), or (T, N / 2) with an activation.

    It computes what `fp8_matmul_reference` computes. x is quantised per row by a separate kernel.

    Args:
        x: (T, K); rows may be strided.
        codes: (N, K) float8_e4m3fn, the values of the weight; rows may be strided.
        scales: (N,) float32, the scale of each output.
        bias: (N,), or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.

    Raises:
        ValueError: If the GPU does not support the format, or shapes or dtypes do not match.
    """
    missing = why_not_fp8()
    if missing is not None:
        raise ValueError(missing)
    check_fp8_matmul(x, codes, scales, bias, out_dtype, activation)
    rows, row_scales = quantize_rows_fp8(x)
    operands = Operands(
        rows, codes, len(codes), out_dtype or x.dtype, scales.contiguous(), row_scales, bias, activation
    )
    return multiply(operands, "fp8", deterministic)
