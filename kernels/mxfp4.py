"""Weights in MXFP4: 4-bit floats (E2M1), and a power of two for each 32 inputs of an output.

The format is defined in "OCP Microscaling Formats" (Open Compute Project, 2023). Values are widened before they are
multiplied; bfloat16 and float32 hold them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.matmul import check_matmul, matmul_reference
from batchinfer_kernels.quantized_matmul import SPAN, pack_codes

GROUP = 32  # inputs that share a power of two
BIAS = 127  # bias of the power's exponent
# Values by their four bits: sign, two exponent bits, one mantissa bit
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-value for value in _SIZES))


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """An MXFP4 weight with N outputs, in the layout of the GPU kernels.

    Attributes:
        packed: (N, bytes) uint8, the 4-bit values, packed by `pack_codes`.
        exponents: (ceil(inputs / 32), N) uint8, the biased exponent of each group of 32 inputs.
        inputs: number of inputs.
    """

    packed: Tensor
    exponents: Tensor
    inputs: int

    @property
    def outputs(self) -> int:
        """Return the number of outputs."""
        return self.packed.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weights:
    """The MXFP4 weights of several experts with N outputs each, in the layout of the GPU kernels.

    Attributes:
        packed: (experts, N, bytes) uint8, the 4-bit values, packed by `pack_codes`.
        exponents: (experts, ceil(inputs / 32), N) uint8, the biased exponent of each group of 32 inputs.
        inputs: number of inputs.
    """

    packed: Tensor
    exponents: Tensor
    inputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (experts, N, inputs)."""
        experts, outputs, _ = self.packed.shape
        return experts, outputs, self.inputs


def check_mxfp4(codes: Tensor, exponents: Tensor) -> None:
    """Raise ValueError unless values and exponents of several experts have the right shapes and dtypes.

    Args:
        codes: (experts, N, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
        exponents: (experts, N, inputs / 32) uint8, biased by 127.
    """
    right = codes.dtype == exponents.dtype == torch.uint8 and codes.dim() == exponents.dim() == 3
    if not right or (*exponents.shape[:2], exponents.shape[2] * GROUP // 2) != tuple(codes.shape):
        given = f"{tuple(codes.shape)} {codes.dtype} and {tuple(exponents.shape)} {exponents.dtype}"
        raise ValueError(f"codes and exponents are {given}; expected uint8, 16 bytes of codes per exponent")


def pack_mxfp4_weights(codes: Tensor, exponents: Tensor) -> Mxfp4Weights:
    """Pack the MXFP4 weights of several experts, with N outputs each, for a GPU.

    Args:
        codes: (experts, N, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
        exponents: (experts, N, inputs / 32) uint8, biased by 127.
    """
    check_mxfp4(codes, exponents)
    experts, outputs, held = codes.shape
    spans = -(-2 * held // SPAN)
    packed = codes.new_empty(experts, outputs, spans * SPAN // 2)
    for matrix, to in zip(codes, packed, strict=True):
        to.copy_(pack_codes(torch.stack((matrix & 15, matrix >> 4), -1).flatten(-2)))
    return Mxfp4Weights(packed, exponents.transpose(1, 2).contiguous(), 2 * held)


def pack_mxfp4_weight(codes: Tensor, exponents: Tensor) -> Mxfp4Weight:
    """Pack one MXFP4 weight, with N outputs, for a GPU.

    Args:
        codes: (N, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
        exponents: (N, inputs / 32) uint8, biased by 127.
    """
    whole = pack_mxfp4_weights(codes[None], exponents[None])
    return Mxfp4Weight(whole.packed[0], whole.exponents[0], whole.inputs)


def check_mxfp4_linear(
    x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, activation: Activation | None
) -> None:
    """Raise ValueError unless x and bias match the weight.

    Args:
        x: (T, inputs).
        weight: the weight, with N outputs.
        bias: (N,), or None.
        activation: gated activation of the result, for which N must be even; or None.
    """
    check_matmul(x, (weight.outputs, weight.inputs), bias, None, activation)


def mxfp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the values of MXFP4 weights: (experts, N, inputs) float32.

    Args:
        codes: (experts, N, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
        exponents: (experts, N, inputs / 32) uint8, biased by 127.
    """
    check_mxfp4(codes, exponents)
    table = torch.tensor(E2M1, device=codes.device)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
    powers = torch.pow(2.0, exponents.int() - BIAS)
    return values * powers.repeat_interleave(GROUP, -1)


def grouped_mxfp4_matmul_reference(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Multiply each row by the MXFP4 weight of its expert, whose values are first rounded to x's dtype.

    Args:
        x: (R, K), rows sorted by expert.
        codes: (experts, N, K / 2) uint8, as in `mxfp4_values`.
        exponents: (experts, N, K / 32) uint8, biased by 127.
        starts: (experts + 1,) int64, the first row of each expert, and R at the end.
        bias: (experts, N), or None.
        activation: gated activation of the result, or None.

    Returns:
        (R, N), or (R, N / 2) with an activation.
    """
    values = mxfp4_values(codes, exponents).to(x.dtype)
    return grouped_matmul_reference(x, values, starts, bias, activation=activation)


def mxfp4_matmul_reference(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Return x W^T + bias for an MXFP4 weight: (T, N), or (T, N / 2) with an activation.

    The values of the weight are rounded to x's dtype and multiplied as in `matmul_reference`.

    Args:
        x: (T, K).
        codes: (N, K / 2) uint8, as in `mxfp4_values`.
        exponents: (N, K / 32) uint8, biased by 127.
        bias: (N,), or None.
        activation: gated activation of the result, or None.
    """
    values = mxfp4_values(codes[None], exponents[None])[0].to(x.dtype)
    return matmul_reference(x, values, bias, activation=activation)
