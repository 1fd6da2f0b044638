"""Linear layers on float8_e4m3fn codes of which blocks share a scale. Cost: cost.block_fp8_linear_cost.

The kernel is matmul_core.matmul_kernel with a group of inputs as a tile's inputs: a tile's products are added up by
tensor cores, and go to float32 sums with the scale of their block and of their row's group. What `deterministic` means
and rests on stands in matmul.py.
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
    """Multiply as batchinfer_kernels.block_fp8_matmul.block_fp8_matmul_reference does. Raises ValueError where the GPU
    has no such format.

    Two launches: one quantises the groups of x. Rows of x and codes may be strided.
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
