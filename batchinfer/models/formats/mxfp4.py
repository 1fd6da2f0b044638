"""MXFP4 weights of gpt-oss: groups of 32 4-bit floats (E2M1) that share a power of two.

Open Compute Project, 2023, "OCP Microscaling Formats".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.formats.encoded_tensor import (
    Codes,
    EncodedTensor,
    EncodedTensors,
    Read,
    Slices,
    Span,
    Stored,
    StoredFormat,
    slice_of,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

GROUP, GROUP_BYTES = 32, 16  # values that share a scale, and the bytes that hold them
BIAS = 127  # of the exponent of a scale


class Mxfp4Format(StoredFormat):
    """The format of gpt-oss checkpoints, which finds the quantised weights of experts.

    The weights are stored as tensors whose names end with `_blocks` and `_scales`.
    """

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the quantised weights of experts among a checkpoint's tensors."""
        encoded = EncodedTensors()
        for name in tensors:
            _add(encoded, name, tensors)
        return encoded


def mxfp4_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat:
    """Return the format for `quant_method: mxfp4`. It has no options, so both arguments are ignored.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: A list for error messages.
    """
    return Mxfp4Format()


def _add(encoded: EncodedTensors, values: str, tensors: Stored) -> None:
    name = values.removesuffix("_blocks")
    scales = f"{name}_scales"
    if name == values or scales not in tensors:
        return
    stored, scale = tensors[values].info, tensors[scales].info
    *more, rows, groups = scale.shape if len(scale.shape) > 1 else (0, 0)
    right = stored.shape == (*scale.shape, GROUP_BYTES) and stored.dtype == scale.dtype == "U8"
    right = right and name not in tensors
    encoded.add(name, Mxfp4Experts((*more, groups * GROUP, rows), (values, scales)), tensors, right)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(EncodedTensor):
    """The matrices of all experts for one product, (..., inputs, outputs), stored transposed in MXFP4.

    Two tensors store them: values (..., outputs, groups, 16), with two values per byte, and exponents of the groups'
    scales (..., outputs, groups).
    """

    format: ClassVar[str] = "mxfp4"

    transposed: ClassVar[bool] = True

    @property
    def matrices(self) -> bool:
        """Return True: the weight is a stack with a matrix per expert, so matrices can be read one at a time."""
        return True

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: MXFP4 in groups of 32."""
        return WeightForm("mxfp4", "group", stored=True, group=GROUP)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values with the exponents of their scales.

        Values are (..., outputs, inputs / 2) uint8, exponents (..., outputs, inputs / 32) uint8.

        Args:
            read: Returns a stored tensor by name.
            index: The number of the expert whose matrix is returned. None: all experts.
        """
        values, scales = map(read, self.stored)
        if index is not None:
            values, scales = values[index], scales[index]
        return Codes(values.flatten(-2), scales)

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: The number of the expert whose matrix is returned, as a stack of one. None: all experts.

        Raises:
            CannotSplit: The range of inputs begins or ends within a group of 32.
        """
        one = () if index is None else (slice(index, index + 1),)
        part = (*one, slice(*outputs), slice_of(inputs, GROUP, "inputs"))
        shape = (*(1 for _ in one), inputs[1] - inputs[0], outputs[1] - outputs[0])
        return replace(self, shape=shape), dict.fromkeys(self.stored, part)

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32.

        Args:
            read: Returns a stored tensor by name.
            index: The number of an expert, for a result (inputs, outputs). None: all experts, (..., inputs, outputs).
        """
        values, scales = map(read, self.stored)
        if index is not None:
            values, scales = values[index], scales[index]
        return mxfp4_values(values, scales).transpose(-1, -2)


def mxfp4_values(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise MXFP4 values.

    Args:
        values: (..., groups, 16) uint8, two values per byte, the first in the lower bits.
        scales: (..., groups) uint8, the exponents of the groups' scales: a scale is 2^(exponent - 127).

    Returns:
        (..., groups * 32) float32.
    """
    import torch  # slow, and not needed to check a checkpoint

    from batchinfer.models.formats.codes import E2M1, byte_pairs, look_up_pairs

    wide = look_up_pairs(values, byte_pairs(E2M1))
    wide.mul_(torch.pow(2.0, scales.int() - BIAS)[..., None])
    return wide.flatten(-2)
