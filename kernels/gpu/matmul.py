"""Linear layers in bfloat16, float16 and float32. Cost: batchinfer_kernels.cost.linear_cost.

The kernel is matmul_core.matmul_kernel. If `deterministic`, a row's bits do not depend on the number of rows or on its
position among them:
- The tile is always the same, so each sum is computed by the same instructions in the same order.
- If inputs are split into segments, their number depends only on the weight's shape. Segment sums are the same whether
  each is one program (few rows) or one program computes them in turn (many rows).
- A tensor core must compute a row and output independently of the others in its tile. Tensor cores are built this way,
  but no manufacturer guarantees it.
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
    """Return x W^T + bias, as `matmul_reference` does: (T, N), or (T, N / 2) with an activation.

    float32 is multiplied without tensor cores.

    Args:
        x: (T, K); rows may be strided.
        weight: (N, K) of x's dtype; rows may be strided.
        bias: (N,), or None.
        out_dtype: x's dtype by default, or float32.
        activation: activation of the gate, the first half of the weight's outputs; None: the result is not gated.
        deterministic: True if a row's bits must not depend on the number of rows or the row's place among them.
    """
    check_matmul(x, weight.shape, bias, out_dtype, activation)
    check_same_dtype(x=x, weight=weight)
    operands = Operands(x, weight, len(weight), out_dtype or x.dtype, bias=bias, activation=activation)
    return multiply(operands, "wide" if x.dtype == torch.float32 else "half", deterministic)
