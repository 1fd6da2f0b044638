"""Linear layers on float8_e4m3fn values with one scale per block. Cost: cost.block_fp8_linear_cost.

A tile of matmul_core.matmul_kernel has the inputs of one group: tensor cores sum its products, and the sum is scaled
and accumulated in float32. matmul.py defines `deterministic`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import BlockWeight, check_block_fp8_matmul
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.fp8_matmul import why_not_fp8
from batchinfer_kernels.gpu.matmul_core import BlockScales, Operands, multiply
from batchinfer_kernels.gpu.quantize_rows import quantize_groups_fp8


def block_fp8_matmul(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return x W^T + bias for a float8 weight with one scale per block: (T, N), or (T, N / 2) with an activation.

    It computes what `block_fp8_matmul_reference` computes. x is quantised by a separate kernel.

    Args:
        x: (T, K); rows may be strided.
        weight: the weight, with N outputs; rows of its values may be strided.
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
    check_block_fp8_matmul(x, weight, bias, out_dtype, activation)
    rows, group_scales = quantize_groups_fp8(x)
    blocks = BlockScales(weight.scales.contiguous(), weight.lines.contiguous(), group_scales)
    codes, kind = weight.codes, out_dtype or x.dtype
    operands = Operands(rows, codes, len(codes), kind, bias=bias, activation=activation, blocks=blocks)
    return multiply(operands, "block_fp8", deterministic)
