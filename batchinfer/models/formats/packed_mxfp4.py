"""MXFP4 of linear layers, as compressed-tensors stores it: a matrix for each layer, not those of all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from batchinfer.models.formats.mxfp4 import GROUP, GROUP_BYTES, mxfp4_values
from batchinfer.models.formats.packed_tensor import (
    Codes,
    PackedTensor,
    PackedTensors,
    Read,
    Slices,
    Span,
    Stored,
    slice_of,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor


def add_packed_mxfp4(packed: PackedTensors, module: str, tensors: Stored) -> None:
    """Note the weight of a module that is stored in MXFP4."""
    stored = module + "weight_packed", module + "weight_scale"
    if packed.lacks(stored[0], tensors, stored[1]):
        return
    codes, scales = (tensors[name].info for name in stored)
    outputs, held = codes.shape if len(codes.shape) == 2 else (0, 0)
    right = codes.dtype == scales.dtype == "U8" and held % GROUP_BYTES == 0
    right = right and scales.shape == (outputs, held // GROUP_BYTES)
    packed.add(module + "weight", PackedMxfp4((outputs, 2 * held), stored), tensors, right)


@dataclass(frozen=True, slots=True)
class PackedMxfp4(PackedTensor):
    """A matrix stored as two values a byte (N, K / 2) and exponents of its scales (N, K / 32)."""

    format: ClassVar[str] = "mxfp4"

    @property
    def form(self) -> WeightForm | None:
        return WeightForm("mxfp4", "group", stored=True, group=GROUP)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        values, scales = map(read, self.stored)
        return Codes(values, scales)

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        values, scales = self.stored
        rows, groups = slice(*outputs), slice_of(inputs, GROUP, "inputs")
        held = slice(groups.start * GROUP_BYTES, groups.stop * GROUP_BYTES)
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape), {values: (rows, held), scales: (rows, groups)}

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        values, scales = map(read, self.stored)
        return mxfp4_values(values.view(len(values), -1, GROUP_BYTES), scales)
