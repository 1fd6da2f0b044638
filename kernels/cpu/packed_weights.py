"""Weights of linear layers in the layout of the compiled operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from batchinfer_kernels.cpu.structures import Weight, address

# The epilogue of a product: none; float32 output; a gated activation with silu, gelu_tanh, clamped_swiglu or gelu; or
# silu, gelu_tanh or gelu of each result
Kind = Literal[
    "plain", "float", "gated", "gelu_gated", "clamped_gated", "exact_gelu_gated", "silu", "gelu", "exact_gelu"
]
# As in panels.h
KINDS: dict[Kind, int] = {
    "plain": 0,
    "float": 1,
    "gated": 2,
    "gelu_gated": 4,
    "clamped_gated": 5,
    "exact_gelu_gated": 6,
    "silu": 7,
    "gelu": 8,
    "exact_gelu": 9,
}


_FLOATS, _INT8, _INT4, _MXFP4 = range(4)  # forms of a weight, as in panels.h
STEP_BYTES = 64  # bytes of a row that a tile product reads at once; as in panels.h
MAX_CODE_BYTES = 2  # size of a quantised activation on the CPU that needs the widest; as in codes.h


def padded(size: int) -> int:
    """Round the bytes of one output's weights up to a multiple of STEP_BYTES."""
    return -(-size // STEP_BYTES) * STEP_BYTES


def codes_room(rows: int, inputs: int) -> Tensor:
    """Return an uninitialised buffer for quantised activations, large enough for their format on any CPU.

    Args:
        rows: number of rows of activations.
        inputs: number of values of a row.
    """
    return torch.empty(rows, MAX_CODE_BYTES * padded(inputs), dtype=torch.uint8)


def scales_room(rows: int, *weights: PackedWeight) -> Tensor:
    """Return an uninitialised buffer for the scales of quantised activations.

    Args:
        rows: number of rows of activations.
        weights: the weights of the products that share the buffer.
    """
    return torch.empty(rows, max(weight.row_scales for weight in weights), dtype=torch.float32)


def is_gated(kind: Kind) -> bool:
    """Return True if a product of this kind computes act(gate) * up: its weight has the gate's rows above up's rows."""
    return kind.endswith("gated")


class PackedWeight:
    """A weight in the layout of the compiled operators, maybe quantised.

    The weight is stored in panels, groups of columns that are multiplied together (panels.h). A column is one output.

    Args:
        panels: the values.
        bias: bias of each column, or None.
        shape: (outputs, inputs).
        kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        starts: initial value of each column's sum in int8, which cancels the offset of 128 in quantised activations:
            -128 × the sum of the column's values, int32. None: not in int8.
        scales: scale of each column in int8, or of each column and group in int4; for MXFP4 the exponents (mxfp4.h).
            None: not quantised.
        zeros: -scale × zero point of each column and group, or None.
        group: number of inputs of a column that share a scale, for int4; else 0.
        hadamard: number of inputs in a block of the Hadamard transform of the weight and of its activations. 0: neither
            is transformed.
    """

    def __init__(
        self,
        panels: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        kind: Kind,
        starts: Tensor | None = None,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        group: int = 0,
        hadamard: int = 0,
    ) -> None:
        self.outputs, self.inputs = shape
        self.kind, self.panels = kind, panels
        self._kept = (bias, starts, scales, zeros)
        addresses = (address(tensor) for tensor in (panels, bias, starts, scales))
        form = _FLOATS
        if starts is not None:
            form = _INT8
        elif scales is not None:
            form = _MXFP4 if scales.dtype == torch.uint8 else _INT4
        self.structure = Weight(*addresses, *shape, address(zeros), group, hadamard=hadamard, form=form)

    @property
    def columns(self) -> int:
        """Return the number of columns of the product: all outputs, or half of them for a gated weight."""
        return self.outputs // 2 if is_gated(self.kind) else self.outputs

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the activations; None for a quantised weight without bias, which accepts any."""
        if not (self.quantized or self.widened):
            return self.panels.dtype
        bias = self._kept[0]
        return None if bias is None else bias.dtype

    @property
    def quantized(self) -> bool:
        """Return True if activations are quantised before they are multiplied by the weight, as for int8 and int4."""
        return self.structure.form in (_INT8, _INT4)

    @property
    def widened(self) -> bool:
        """Return True if the weight is MXFP4. It is dequantised before the product; activations are not quantised."""
        return bool(self.structure.form == _MXFP4)

    @property
    def row_scales(self) -> int:
        """Return the number of scales and offsets of a row of quantised activations, as `scales_of` in C."""
        if self.structure.form != _INT4:
            return 1
        groups: int = -(-self.inputs // self.structure.group)
        return 2 * groups  # the scale of each group, and its offset


class PackedExperts(PackedWeight):
    """The packed weights of several experts, (outputs, inputs) each.

    Args:
        panels: the values, one row per expert.
        bias: bias of each expert's columns, or None.
        shape: (experts, outputs, inputs).
        kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        starts: as in PackedWeight, one row per expert.
        scales: as in PackedWeight, one row per expert.
        group: as in PackedWeight; 32 for MXFP4.
        zeros: as in PackedWeight, one row per expert.
        hadamard: as in PackedWeight.
    """

    def __init__(
        self,
        panels: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int, int],
        kind: Kind,
        starts: Tensor | None = None,
        scales: Tensor | None = None,
        group: int = 0,
        zeros: Tensor | None = None,
        hadamard: int = 0,
    ) -> None:
        super().__init__(panels, bias, shape[1:], kind, starts, scales, zeros, group, hadamard)
        self.count = shape[0]

    def wide_bytes(self, itemsize: int) -> int:
        """Return the bytes of a dequantised panel of an MXFP4 weight; 0 for other weights.

        Args:
            itemsize: bytes per dequantised value.
        """
        exponents = self._kept[2]
        if not self.widened or exponents is None:
            return 0
        return int(exponents.shape[-1]) * padded(self.inputs * itemsize)
