"""MXFP4 weights of linear layers, as compressed-tensors stores them: one matrix per tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from batchinfer.models.formats.encoded_tensor import (
    Codes,
    EncodedTensor,
    EncodedTensors,
    Read,
    Slices,
    Span,
    Stored,
    slice_of,
)
from batchinfer.models.formats.mxfp4 import GROUP, GROUP_BYTES, mxfp4_values
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor


def add_packed_mxfp4(encoded: EncodedTensors, module: str, tensors: Stored) -> None:
    """Add the MXFP4 weight of a module to `encoded`. If its tensors are missing or do not fit, add an error message.

    Args:
        encoded: The quantised weights of the checkpoint that were found so far.
        module: The module's name, with a dot at its end.
        tensors: All tensors of the checkpoint.
    """
    stored = module + "weight_packed", module + "weight_scale"
    if encoded.lacks(stored[0], tensors, stored[1]):
        return
    codes, scales = (tensors[name].info for name in stored)
    outputs, held = codes.shape if len(codes.shape) == 2 else (0, 0)
    right = codes.dtype == scales.dtype == "U8" and held % GROUP_BYTES == 0
    right = right and scales.shape == (outputs, held // GROUP_BYTES)
    encoded.add(module + "weight", PackedMxfp4((outputs, 2 * held), stored), tensors, right)


@dataclass(frozen=True, slots=True)
class PackedMxfp4(EncodedTensor):
    """A weight matrix (N outputs, K inputs) that compressed-tensors stores in MXFP4.

    Two tensors store it: values (N, K / 2), two per byte, and exponents of the groups' scales (N, K / 32).
    """

    format: ClassVar[str] = "mxfp4"

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: MXFP4 in groups of 32."""
        return WeightForm("mxfp4", "group", stored=True, group=GROUP)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, (outputs, inputs / 2) uint8, with scales' exponents, (outputs, inputs / 32) uint8.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales = map(read, self.stored)
        return Codes(values, scales)

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: Not used, as the weight is not a stack of matrices.

        Raises:
            CannotSplit: A range begins or ends within a word or a group that shares a scale.
        """
        values, scales = self.stored
        rows, groups = slice(*outputs), slice_of(inputs, GROUP, "inputs")
        held = slice(groups.start * GROUP_BYTES, groups.stop * GROUP_BYTES)
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape), {values: (rows, held), scales: (rows, groups)}

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales = map(read, self.stored)
        return mxfp4_values(values.view(len(values), -1, GROUP_BYTES), scales)
