"""Linear layers in bfloat16, float16 and float32. Cost: batchinfer_kernels.cost.linear_cost.

The kernel is matmul_core.matmul_kernel. With `deterministic` a row's bits do not depend on how many rows there are, nor
on where it stands among them: the tile is one and the same, so that each sum is taken by the same instructions in the
same order; where inputs are split into segments their number depends on the weight's shape alone, and a segment's sums
are the same whether it is a program of its own (few rows) or one of several in turn (many). What a GPU has to add to
this is that a tensor core's result for one line and row does not depend on the lines and rows beside it, which is how
they are built (each is a sum over the inputs of its own), though no manufacturer promises it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.checks import check_same_dtype
from batchinfer_kernels.gpu.matmul_core import Operands, multiply
from batchinfer_kernels.matmul import check_matmul


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Multiply as batchinfer_kernels.matmul.matmul_reference does. Rows of x and of the weight may be strided.

    float32 is multiplied as it is, without tensor cores.
    """
    check_matmul(x, weight.shape, bias, out_dtype, activation)
    check_same_dtype(x=x, weight=weight)
    operands = Operands(x, weight, len(weight), out_dtype or x.dtype, bias=bias, activation=activation)
    return multiply(operands, "wide" if x.dtype == torch.float32 else "half", deterministic)
