"""Matrix products of rows that are sorted by their weight, such as the experts of a feed-forward layer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import BlockWeight, block_fp8_matmul_reference, check_blocks
from batchinfer_kernels.fp8_matmul import FP8, fp8_matmul_reference
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.matmul import finish_product, products
from batchinfer_kernels.quantized_linear import quantized_linear_reference


def grouped_matmul_reference(
    x: Tensor,
    weight: Tensor,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    lines: Tensor | None = None,
    activation: Activation | None = None,
    hadamard: bool = False,
) -> Tensor:
    """Multiply each row of x by the weight of its group: (R, N), or (R, N / 2) with an activation.

    A group is an expert. Row r belongs to group e if starts[e] ≤ r < starts[e + 1]; a group may be empty. Bias,
    activation and rounding are as in `matmul_reference`.

    Args:
        x: (R, K).
        weight: (E, N, K), the weights of E groups, of x's dtype; or int8 or float8_e4m3fn values with `scales`.
        starts: (E + 1,) int64, the first row of each group, and R at the end.
        bias: (E, N), or None.
        scales: (E, N), the scale of each output of a quantised weight; x is then quantised per row. With `lines`: (E,
            S, ceil(K / 128)), as in BlockWeight.
        lines: (N,) int32, BlockWeight.lines, the same for all groups, for float8_e4m3fn weights with one scale per
            block.
        activation: gated activation of the result, or None.
        hadamard: True if an int8 weight was transformed; see `quantize_weight`.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_grouped_matmul(x, weight, starts, bias, scales, activation, lines)
    outputs = weight.shape[1] // (1 if activation is None else 2)
    y = x.new_empty(len(x), outputs)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        if first == end:
            continue
        rows, matrix = x[first:end], weight[expert]
        if scales is None:
            sums = products(rows, matrix)
        elif lines is not None:
            sums = block_fp8_matmul_reference(rows.float(), BlockWeight(matrix, scales[expert], lines))
        else:
            given = rows.float(), matrix, scales[expert]
            fp8 = matrix.dtype == FP8
            sums = (
                fp8_matmul_reference(*given) if fp8 else quantized_linear_reference(*given, hadamard=hadamard)
            )
        added = None if bias is None else bias[expert]
        y[first:end] = finish_product(sums, added, x.dtype, activation)
    return y


def check_grouped_matmul(
    x: Tensor,
    weight: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    activation: Activation | None,
    lines: Tensor | None = None,
) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `grouped_matmul_reference` accepts."""
    if weight.dim() != 3 or x.dim() != 2 or x.shape[1] != weight.shape[2] or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the weights are {tuple(weight.shape)}")
    if weight.dtype not in ((x.dtype,) if scales is None else (torch.int8, FP8)):
        beside = "without scales" if scales is None else "with scales"
        raise ValueError(f"x is {x.dtype}, the weights are {weight.dtype}, {beside}")
    if lines is not None:
        if scales is None:
            raise ValueError("lines were passed without scales")
        check_blocks(BlockWeight(weight, scales, lines))
    for name, values in (("bias", bias), ("scales", scales if lines is None else None)):
        if values is not None and values.shape != weight.shape[:2]:
            raise ValueError(f"{name} is {tuple(values.shape)}, the weights are {tuple(weight.shape)}")
    if starts.shape != (len(weight) + 1,) or starts.is_floating_point():
        raise ValueError(f"starts are {tuple(starts.shape)} {starts.dtype}, there are {len(weight)} weights")
    if activation is not None and weight.shape[1] % 2:
        raise ValueError(f"gate and up need an even number of rows, the weights have {weight.shape[1]}")
