"""Linear layers on int8 values in both factors. Cost: batchinfer_kernels.cost.quantized_linear_cost.

The kernel is matmul_core.matmul_kernel. Integer sums are exact in any order, so a row's bits depend only on that row,
and are the same on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.matmul_core import Operands, multiply
from batchinfer_kernels.gpu.quantize_rows import quantize_rows
from batchinfer_kernels.matmul import check_matmul
from batchinfer_kernels.quantized_linear import MAX_CODE, check_quantized_linear

# Sums of at most this many products of a quantised activation and any int8 stay below 2^31
MAX_INPUTS = (2**31 - 1) // (MAX_CODE * 128)


def int8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    hadamard: bool = False,
) -> Tensor:
    """Return x W^T + bias for an int8 weight, with x quantised per row: (T, N), or (T, N / 2) with an activation.

    Without an activation, the result equals that of `quantized_linear_reference`. x is quantised by a separate kernel.

    Args:
        x: (T, K); rows may be strided.
        codes: (N, K) int8, the values of the weight; rows may be strided.
        scales: (N,) float32, the scale of each output.
        bias: (N,), or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None; see `matmul_reference`.
        hadamard: True if the weight was transformed; see `quantize_weight`.

    Raises:
        ValueError: If shapes or dtypes do not match, or there are more than MAX_INPUTS inputs.
    """
    check_quantized_linear(x, codes, scales, bias)
    if x.shape[1] > MAX_INPUTS:
        raise ValueError(f"sums over {x.shape[1]} inputs may overflow; at most {MAX_INPUTS} are supported")
    check_matmul(x, codes.shape, bias, out_dtype, activation)
    rows, row_scales = quantize_rows(x, hadamard)
    operands = Operands(
        rows, codes, len(codes), out_dtype or x.dtype, scales.contiguous(), row_scales, bias, activation
    )
    return multiply(operands, "int8", deterministic=True)
