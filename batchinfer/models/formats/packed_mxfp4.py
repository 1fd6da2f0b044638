"""MXFP4 weights of linear layers, as compressed-tensors stores them: one matrix per tensor."""

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
    """Add the MXFP4 weight of a module to `packed`, or a message if its tensors are missing or do not fit.

    Args:
        packed: The weights of the checkpoint found so far.
        module: The module's name, with a dot at its end.
        tensors: All tensors of the checkpoint.
    """
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
    """A weight matrix (N outputs, K inputs) in MXFP4.

    The tensors in `stored` are values (N, K / 2), with two per byte, and exponents of scales (N, K / 32).
    """

    format: ClassVar[str] = "mxfp4"

    @property
    def form(self) -> WeightForm | None:
        """Return the form for operators: MXFP4 in groups of 32."""
        return WeightForm("mxfp4", "group", stored=True, group=GROUP)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the values, (outputs, inputs / 2) uint8, and the scales' exponents, (outputs, inputs / 32) uint8."""
        values, scales = map(read, self.stored)
        return Codes(values, scales)

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        """Return the weight of a range of outputs and inputs, and slices to read; see `PackedTensor.cut`."""
        values, scales = self.stored
        rows, groups = slice(*outputs), slice_of(inputs, GROUP, "inputs")
        held = slice(groups.start * GROUP_BYTES, groups.stop * GROUP_BYTES)
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape), {values: (rows, held), scales: (rows, groups)}

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs); `index` is ignored."""
        values, scales = map(read, self.stored)
        return mxfp4_values(values.view(len(values), -1, GROUP_BYTES), scales)
