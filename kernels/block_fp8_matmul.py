"""Linear layers on float8_e4m3fn codes of which blocks share a scale, as DeepSeek-V3 and others publish them.

DeepSeek-AI, 2024, "DeepSeek-V3 technical report", 3.3.2: a weight has a scale for each block of 128 outputs and 128
inputs, and a token one for each group of 128 inputs; the products of 128 inputs are scaled and added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.fp8_matmul import FP8, quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.matmul import check_matmul, finished, products

GROUP = 128  # inputs that share a scale, of a token and of an output


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight (N, K), or those of several experts (E, N, K), as codes, of which blocks share a scale.

    codes: (N, K) float8_e4m3fn; scales: (S, ceil(K / 128)) float32, one for each group of inputs; both with a dimension
    of experts before these, or not. lines: (N,) int32: which of the S rows of scales an output has. So weights can lie
    above one another, or be a part of another, whatever their blocks are divisible by.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (T, K) → codes (T, K) float8_e4m3fn and scales (ceil(K / 128), T) float32.

    Each group of 128 values is what quantize_rows_fp8 makes of a row; the last group may be shorter.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, not a matrix of floats")
    if not x.shape[1]:
        return x.to(FP8), x.new_empty(0, len(x), dtype=torch.float32)
    coded = [quantize_rows_fp8(group) for group in torch.split(x, GROUP, 1)]
    codes, scales = zip(*coded, strict=True)
    return torch.cat([c.view(torch.uint8) for c in codes], 1).view(FP8), torch.stack(scales)


def quantize_blocks_fp8(weight: Tensor, rows: int = GROUP) -> BlockWeight:
    """weight: (N, K) of floats → its codes, with a scale for each block of `rows` outputs and 128 inputs."""
    coded = [
        quantize_rows_fp8(block.reshape(1, -1))
        for part in torch.split(weight, rows)
        for block in torch.split(part, GROUP, 1)
    ]
    blocks = iter(codes.view(torch.uint8).flatten() for codes, _ in coded)
    parts = [
        torch.cat(
            [next(blocks).view(len(part), -1) for _ in range(-(-weight.shape[1] // GROUP))],
            1,
        )
        for part in torch.split(weight, rows)
    ]
    scales = torch.cat([scale for _, scale in coded]).view(len(parts), -1)
    return BlockWeight(torch.cat(parts).view(FP8), scales, block_lines(len(weight), rows, weight.device))


def block_lines(outputs: int, rows: int, device: torch.device) -> Tensor:
    """(N,) int32: the row of scales of each output where `rows` of them share one."""
    return torch.arange(outputs, dtype=torch.int32, device=device) // rows


def block_fp8_matmul_reference(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """As matmul_reference, with the weight as codes of which blocks share a scale.

    x is quantised by groups of 128 inputs. The sums of a group are float32, are multiplied with group scale × block
    scale, and are added up in the order of the groups, in float32.
    """
    check_block_fp8_matmul(x, weight, bias, out_dtype, activation)
    sums = torch.zeros(len(x), len(weight.codes), device=x.device)
    for part in _scaled_products(x, weight):
        sums += part
    return finished(sums, bias, out_dtype or x.dtype, activation)


def _scaled_products(x: Tensor, weight: BlockWeight) -> Iterator[Tensor]:
    """(T, N) float32 of each group of inputs."""
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
    """Raises ValueError when shapes or dtypes do not fit."""
    check_matmul(x, weight.codes.shape, bias, out_dtype, activation)
    check_blocks(weight)


def check_blocks(weight: BlockWeight) -> None:
    """Raise ValueError for a weight, or the weights of several experts, whose codes, scales and lines do not fit one
    another."""
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
