"""Linear layers on float8_e4m3fn values with one scale per block, as DeepSeek-V3 and others publish them.

A weight has a scale for each block of 128 outputs and 128 inputs, and an activation has one for each token and group of
128 inputs. The product of each group is scaled and accumulated in float32 (DeepSeek-AI, 2024, "DeepSeek-V3 technical
report", section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.fp8_matmul import FP8, quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.matmul import check_matmul, finish_product, products

GROUP = 128  # inputs that share a scale, in activations and weights


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A float8 weight with one scale per block of the matrix, or such weights of E experts.

    A block is a number of outputs × 128 inputs.

    Attributes:
        codes: (N, K) float8_e4m3fn, N outputs and K inputs; with experts (E, N, K).
        scales: (S, ceil(K / 128)) float32, for S blocks of outputs; with experts (E, S, ceil(K / 128)).
        lines: (N,) int32, the row of `scales` that each output uses. Blocks can differ in their number of outputs.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (T, K) to float8_e4m3fn with one scale per row and group of 128 inputs.

    The last group may be shorter. `quantize_rows_fp8` states how values are rounded.

    Returns:
        Values (T, K) float8_e4m3fn and scales (ceil(K / 128), T) float32.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, not a matrix of floats")
    if not x.shape[1]:
        return x.to(FP8), x.new_empty(0, len(x), dtype=torch.float32)
    coded = [quantize_rows_fp8(group) for group in torch.split(x, GROUP, 1)]
    codes, scales = zip(*coded, strict=True)
    return torch.cat([c.view(torch.uint8) for c in codes], 1).view(FP8), torch.stack(scales)


def block_lines(outputs: int, rows: int, device: torch.device) -> Tensor:
    """Return `BlockWeight.lines` for blocks of equal height: (outputs,) int32, equal to output // rows.

    Args:
        outputs: number of outputs of the weight.
        rows: number of outputs of a block, which share a scale.
        device: device of the result.
    """
    return torch.arange(outputs, dtype=torch.int32, device=device) // rows


def block_fp8_matmul_reference(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Return x W^T + bias for a float8 weight with one scale per block: (T, N), or (T, N / 2) with an activation.

    x is quantised to float8 per row and group of 128 inputs. The product of each group is multiplied by its scales of x
    and of the weight, and the groups are added in order, all in float32.

    Args:
        x: (T, K) floats.
        weight: the weight, with N outputs and K inputs.
        bias: (N,) floats, or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None; see `matmul_reference`.
    """
    check_block_fp8_matmul(x, weight, bias, out_dtype, activation)
    sums = torch.zeros(len(x), len(weight.codes), device=x.device)
    for part in _scaled_products(x, weight):
        sums += part
    return finish_product(sums, bias, out_dtype or x.dtype, activation)


def _scaled_products(x: Tensor, weight: BlockWeight) -> Iterator[Tensor]:
    rows, row_scales = quantize_groups_fp8(x)
    wide = (rows.float(), weight.codes.float())
    scales = weight.scales[weight.lines.long()]
    for group, (part, codes) in enumerate(zip(*(torch.split(each, GROUP, 1) for each in wide), strict=True)):
        yield products(part, codes) * (row_scales[group][:, None] * scales[:, group])


def check_block_fp8_matmul(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `block_fp8_matmul_reference` accepts."""
    check_matmul(x, weight.codes.shape, bias, out_dtype, activation)
    check_blocks(weight)


def check_blocks(weight: BlockWeight) -> None:
    """Raise ValueError unless the tensors of a weight have the shapes and dtypes that BlockWeight describes."""
    *experts, outputs, inputs = weight.codes.shape
    if weight.codes.dtype != FP8:
        raise ValueError(f"codes are {weight.codes.dtype}, not {FP8}")
    scales, groups = weight.scales, -(-inputs // GROUP)
    whole = [*experts, *scales.shape[-2:-1], groups]
    if scales.dtype != torch.float32 or list(scales.shape) != whole:
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, not {tuple(whole)} torch.float32")
    if weight.lines.shape != (outputs,) or weight.lines.dtype != torch.int32:
        raise ValueError(
            f"lines are {tuple(weight.lines.shape)} {weight.lines.dtype}, the weight has {outputs} rows"
        )
