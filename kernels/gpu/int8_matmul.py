"""Linear layers on int8 codes of both factors. Cost: batchinfer_kernels.cost.quantized_linear_cost.

The kernel is matmul_core.matmul_kernel. Sums are exact integers, so that a row's bits depend on that row alone however
they are cut, and are those of the CPU's operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.matmul_core import Operands, multiply
from batchinfer_kernels.gpu.quantize_rows import quantize_rows
from batchinfer_kernels.matmul import check_matmul
from batchinfer_kernels.quantized_linear import MAX_CODE, check_quantized_linear

# Sums of at most this many products of an activation's code and any int8 stay below 2^31
MOST_INPUTS = (2**31 - 1) // (MAX_CODE * 128)


def int8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Multiply as batchinfer_kernels.quantized_linear.quantized_linear_reference does; `out_dtype` and `activation` are
    those of batchinfer_kernels.matmul.matmul_reference.

    Two launches: one quantises the rows of x. Rows of x and codes may be strided. Raises ValueError for more inputs
    than MOST_INPUTS, whose sums int32 might not hold.
    """
    check_quantized_linear(x, codes, scales, bias)
    if x.shape[1] > MOST_INPUTS:
        raise ValueError(f"sums over {x.shape[1]} inputs may overflow, at most {MOST_INPUTS} may be summed")
    check_matmul(x, codes.shape, bias, out_dtype, activation)
    rows, row_scales = quantize_rows(x)
    operands = Operands(
        rows, codes, len(codes), out_dtype or x.dtype, scales.contiguous(), row_scales, bias, activation
    )
    return multiply(operands, "int8", deterministic=True)
