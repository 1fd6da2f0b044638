"""MXFP4 as in gpt-oss: 4-bit floats (E2M1), 32 of which share a power of two (Open Compute Project, 2023, "OCP
Microscaling Formats")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.formats.packed_tensor import (
    Codes,
    PackedTensor,
    PackedTensors,
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
BIAS = 127  # of a scale's exponent


class Mxfp4Format(StoredFormat):
    """The experts of gpt-oss: `_blocks` of values and their `_scales`."""

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        for name in tensors:
            _add(packed, name, tensors)
        return packed


def mxfp4_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat:
    """Return the format of `quant_method: mxfp4`, which has no options."""
    return Mxfp4Format()


def _add(packed: PackedTensors, values: str, tensors: Stored) -> None:
    name = values.removesuffix("_blocks")
    scales = f"{name}_scales"
    if name == values or scales not in tensors:
        return
    stored, scale = tensors[values].info, tensors[scales].info
    *more, rows, groups = scale.shape if len(scale.shape) > 1 else (0, 0)
    right = stored.shape == (*scale.shape, GROUP_BYTES) and stored.dtype == scale.dtype == "U8"
    right = right and name not in tensors
    packed.add(name, Mxfp4Experts((*more, groups * GROUP, rows), (values, scales)), tensors, right)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(PackedTensor):
    """Matrices (…, outputs, groups, bytes), which stand for their transposes (…, inputs, outputs)."""

    format: ClassVar[str] = "mxfp4"

    transposed: ClassVar[bool] = True

    @property
    def matrices(self) -> bool:
        return True

    @property
    def form(self) -> WeightForm | None:
        return WeightForm("mxfp4", "group", stored=True, group=GROUP)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        values, scales = map(read, self.stored)
        if index is not None:
            values, scales = values[index], scales[index]
        return Codes(values.flatten(-2), scales)

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        one = () if index is None else (slice(index, index + 1),)
        part = (*one, slice(*outputs), slice_of(inputs, GROUP, "inputs"))
        shape = (*(1 for _ in one), inputs[1] - inputs[0], outputs[1] - outputs[0])
        return replace(self, shape=shape), dict.fromkeys(self.stored, part)

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        values, scales = map(read, self.stored)
        if index is not None:
            values, scales = values[index], scales[index]
        return mxfp4_values(values, scales).transpose(-1, -2)


def mxfp4_values(values: Tensor, scales: Tensor) -> Tensor:
    """values: (…, groups, 16) uint8, two values a byte; scales: (…, groups) uint8 → (…, groups × 32) float32."""
    import torch  # slow, and not needed to check a checkpoint

    from batchinfer.models.formats.codes import E2M1, looked_up, pairs_of

    wide = looked_up(values, pairs_of(E2M1))
    wide.mul_(torch.pow(2.0, scales.int() - BIAS)[..., None])
    return wide.flatten(-2)
