"""Linear layers with only the weight quantised, to int4 in groups of inputs.

Activations are not quantised; weights are widened while they are read. int4 is that of GPTQ (Frantar et al., 2023) and
AWQ (Lin et al., 2024): a scale and an optional zero point per output and group of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.matmul import check_matmul, finish_product, products

LEAST_CODE = -8
MAX_ZERO = 8  # some formats store zero points minus one
SPAN = 128  # inputs that are packed together
PIECES = 4  # of a span, one in each nibble of a word
PIECE = SPAN // PIECES  # adjacent inputs that always share a scale: group sizes are multiples of this


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """An int4 weight with N outputs, in the layout of the GPU kernels: weight ≈ (values - zeros) × scales.

    Attributes:
        packed: (N, bytes) uint8, the values -8 … 7 plus 8, packed by `pack_codes`.
        scales: (groups, N) of the activations' dtype, a scale per group of inputs and output.
        zeros: (groups, N) int8 in -8 … 8, the zero points; None: all 0.
        inputs: number of inputs.
        group: number of inputs of a group, a multiple of 32.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    inputs: int
    group: int

    @property
    def outputs(self) -> int:
        """Return the number of outputs."""
        return self.packed.shape[0]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack 4-bit values (N, K) in the layout of the GPU kernels: (N, ceil(K / 128) × 64) uint8.

    A row is padded with zeros to a multiple of 128 values. Each 128 values become 32 little-endian 16-bit words. Word i
    contains the values i, i + 32, i + 64 and i + 96, the first in the lowest bits.

    Args:
        codes: (N, K) uint8, below 16.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"codes are {tuple(codes.shape)} {codes.dtype}")
    spans = -(-codes.shape[1] // SPAN)
    filled = torch.nn.functional.pad(codes, (0, SPAN * spans - codes.shape[1]))
    # One mask and shift of all words yields adjacent values, each in the 16 bits of its float
    pieces = filled.reshape(len(codes), spans, PIECES, PIECE).transpose(2, 3)
    bytes_of = pieces[..., 0::2] | pieces[..., 1::2] << 4  # two neighbours of a word share a byte
    return bytes_of.reshape(len(codes), spans * SPAN // 2).contiguous()


def unpack_codes(packed: Tensor, inputs: int) -> Tensor:
    """Return the values that `pack_codes` packed: (N, inputs) uint8.

    Args:
        packed: (N, bytes) uint8.
        inputs: number of values of a row, without padding.
    """
    values = torch.stack((packed & 15, packed >> 4), -1)
    spans = packed.shape[1] * 2 // SPAN
    wide = values.reshape(len(packed), spans, PIECE, PIECES).transpose(2, 3)
    return wide.reshape(len(packed), spans * SPAN)[:, :inputs]


def pack_int4_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype
) -> Int4Weight:
    """Pack an int4 weight (N, K) in the layout of Int4Weight.

    Args:
        codes: (N, K) int8 in -8 … 7.
        scales: (N, groups) floats.
        zeros: (N, groups) integers in -8 … 8, as floats, the zero points. None: all 0.
        group: number of inputs that share a scale, a multiple of 32.
        dtype: dtype of the activations; scales are rounded to it.

    Raises:
        ValueError: If shapes, dtypes or zero points are not as described.
    """
    groups = -(-codes.shape[1] // group) if group > 0 and codes.dim() == 2 else 0
    shapes = {tuple(part.shape) for part in (scales, zeros) if part is not None}
    if codes.dtype != torch.int8 or shapes != {(len(codes), groups)} or group % PIECE:
        raise ValueError(
            f"codes are {tuple(codes.shape)} {codes.dtype}, scales {tuple(scales.shape)}, of {group}"
        )
    packed = pack_codes((codes - LEAST_CODE).to(torch.uint8))
    kept = None if zeros is None or not bool(zeros.any()) else zeros.to(torch.int8).T.contiguous()
    if kept is not None and (int(kept.min()) < LEAST_CODE or int(kept.max()) > MAX_ZERO):
        raise ValueError(f"zeros are {int(kept.min())} … {int(kept.max())}, not in {LEAST_CODE} … {MAX_ZERO}")
    return Int4Weight(packed, scales.to(dtype).T.contiguous(), kept, codes.shape[1], group)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weights:
    """The int4 weights of several experts with N outputs each: Int4Weight with a first dimension of experts.

    Attributes:
        packed: (experts, N, bytes) uint8.
        scales: (experts, groups, N) of the activations' dtype.
        zeros: (experts, groups, N) int8, the zero points; None: all 0.
        inputs: number of inputs.
        group: number of inputs of a group.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    inputs: int
    group: int

    def of(self, expert: int) -> Int4Weight:
        """Return the weight of one expert."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return Int4Weight(self.packed[expert], self.scales[expert], zeros, self.inputs, self.group)


def pack_int4_experts(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype
) -> Int4Weights:
    """Pack the int4 weights of several experts in the layout of Int4Weights.

    Args:
        codes: (experts, N, K) int8 in -8 … 7.
        scales: (experts, N, groups) floats.
        zeros: (experts, N, groups) integers in -8 … 8, as floats, the zero points; None: all 0.
        group: number of inputs that share a scale, a multiple of 32.
        dtype: dtype of the activations; scales are rounded to it.
    """
    outputs = codes.shape[1]
    flat = codes.flatten(0, 1), scales.flatten(0, 1), None if zeros is None else zeros.flatten(0, 1)
    whole = pack_int4_weight(*flat, group, dtype)

    def split(grouped: Tensor) -> Tensor:
        return grouped.view(len(grouped), -1, outputs).transpose(0, 1).contiguous()

    packed = whole.packed.view(len(codes), outputs, -1)
    kept = None if whole.zeros is None else split(whole.zeros)
    return Int4Weights(packed, split(whole.scales), kept, whole.inputs, group)


def grouped_int4_matmul_reference(
    x: Tensor,
    weights: Int4Weights,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Multiply each row by the int4 weight of its expert, which is first dequantised to x's dtype.

    Args:
        x: (R, K), rows sorted by expert.
        weights: the weights of the experts, with N outputs each.
        starts: (experts + 1,) int64, the first row of each expert, and R at the end.
        bias: (experts, N), or None.
        activation: gated activation of the result, or None.

    Returns:
        (R, N), or (R, N / 2) with an activation.
    """
    values = torch.stack([int4_values(weights.of(expert)) for expert in range(len(weights.packed))])
    return grouped_matmul_reference(x, values, starts, bias, activation=activation)


def int4_values(weight: Int4Weight) -> Tensor:
    """Return the dequantised weight (N, inputs) in the dtype of its scales, rounded once per value."""
    steps = unpack_codes(weight.packed, weight.inputs).float() + LEAST_CODE
    if weight.zeros is not None:
        steps -= _each_input(weight.zeros, weight)
    return (steps * _each_input(weight.scales, weight)).to(weight.scales.dtype)


def _each_input(grouped: Tensor, weight: Int4Weight) -> Tensor:
    return grouped.float().T.repeat_interleave(weight.group, 1)[:, : weight.inputs]


def check_int4_weight(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raise ValueError unless the arguments have the shapes and dtypes that `int4_weight_matmul_reference` accepts."""
    check_matmul(x, (weight.outputs, weight.inputs), bias, out_dtype, activation)
    if weight.group < PIECE or weight.group % PIECE:
        raise ValueError(f"the group size is {weight.group}, not a multiple of {PIECE}")
    if (
        weight.packed.shape[1:] != (-(-weight.inputs // SPAN) * SPAN // 2,)
        or weight.packed.dtype != torch.uint8
    ):
        raise ValueError(f"packed codes are {tuple(weight.packed.shape)} {weight.packed.dtype}")
    groups = -(-weight.inputs // weight.group)
    if weight.scales.shape != (groups, weight.outputs) or weight.scales.dtype != x.dtype:
        raise ValueError(f"scales are {tuple(weight.scales.shape)} {weight.scales.dtype}, x is {x.dtype}")
    zeros = weight.zeros
    if zeros is not None and (zeros.shape != weight.scales.shape or zeros.dtype != torch.int8):
        raise ValueError(f"zeros are {tuple(zeros.shape)} {zeros.dtype}")


def int4_weight_matmul_reference(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Return x W^T + bias for an int4 weight: (T, N), or (T, N / 2) with an activation.

    The weight is dequantised to x's dtype and multiplied as in `matmul_reference`.

    Args:
        x: (T, K).
        weight: the weight, with N outputs.
        bias: (N,), or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None.
    """
    check_int4_weight(x, weight, bias, out_dtype, activation)
    return finish_product(products(x, int4_values(weight)), bias, out_dtype or x.dtype, activation)
