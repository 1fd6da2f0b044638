"""A linear layer's weight in the layout of the compiled operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from batchinfer_kernels.cpu.structures import Weight, address

# What a product writes: the stored type, float32, a gate of silu, gelu_tanh, clamped_swiglu or gelu, or silu, gelu_tanh
# or gelu of each result
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


STEP_BYTES = 64  # of a row, which a product in tiles takes at once; as in panels.h
MOST_CODE_BYTES = 2  # that a quantised activation takes; as in codes.h


def padded(size: int) -> int:
    """Return `size` bytes rounded up to whole steps: those of an output's inputs in a panel."""
    return -(-size // STEP_BYTES) * STEP_BYTES


def codes_room(rows: int, inputs: int) -> Tensor:
    """Return room for quantised rows, of as many bytes as they take on any CPU."""
    return torch.empty(rows, MOST_CODE_BYTES * padded(inputs), dtype=torch.uint8)


def is_gated(kind: Kind) -> bool:
    """Whether the weight is a gate above an up."""
    return kind.endswith("gated")


class PackedWeight:
    """A weight (outputs, inputs) cut into panels, as panels.h says; the rest lies in the order of their columns.

    Quantised, `panels` are int8 codes, and each column has a start (int32: -128 times the sum of its codes) and a scale
    (float32). With a `group` they are int4 codes, and so many inputs of a column share a scale and maybe a zero.
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
    ) -> None:
        self.outputs, self.inputs = shape
        self.kind, self.panels = kind, panels
        self._kept = (bias, starts, scales, zeros)
        addresses = (address(tensor) for tensor in (panels, bias, starts, scales))
        self.structure = Weight(*addresses, *shape, address(zeros), group)

    @property
    def columns(self) -> int:
        """Columns of the result: a gated weight's halves become one."""
        return self.outputs // 2 if is_gated(self.kind) else self.outputs

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the activations that it is multiplied with; None for codes without a bias, which take any."""
        if not (self.quantized or self.widened):
            return self.panels.dtype
        bias = self._kept[0]
        return None if bias is None else bias.dtype

    @property
    def quantized(self) -> bool:
        """Whether the panels are codes that are multiplied with codes."""
        return self._kept[1] is not None

    @property
    def widened(self) -> bool:
        """Whether the panels are codes in MXFP4, which become values before they are multiplied."""
        return self.panels.dtype == torch.uint8 and not self.quantized


class PackedExperts(PackedWeight):
    """The weights of `count` experts, (outputs, inputs) each: panels and what belongs to columns, of one after the
    other. In MXFP4 scales are exponents, as mxfp4.h has them."""

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
    ) -> None:
        super().__init__(panels, bias, shape[1:], kind, starts, scales, zeros, group)
        self.count = shape[0]

    def wide_bytes(self, itemsize: int) -> int:
        """Return the bytes of a panel once it is widened to values of `itemsize` bytes; 0 where none is."""
        exponents = self._kept[2]
        if not self.widened or exponents is None:
            return 0
        return int(exponents.shape[-1]) * padded(self.inputs * itemsize)
