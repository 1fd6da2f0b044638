"""NVFP4: 4-bit floats (E2M1), 16 of which share a scale in FP8, with one more scale for the whole tensor, as
compressed-tensors and NVIDIA's Model Optimizer store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.fp8 import CACHE_SCALES, DTYPES, add_fp8
from batchinfer.models.formats.packed_tensor import PackedTensor, PackedTensors, Read, Stored, StoredFormat

if TYPE_CHECKING:
    from torch import Tensor

NVFP4_GROUP = 16
ALGORITHMS = ("NVFP4", "FP8")


class ModeloptFormat(StoredFormat):
    """Weights of Model Optimizer: NVFP4 or FP8, which their tensors show."""

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        for name, tensor in tensors.items():
            if name + "_scale_2" in tensors:
                module = name.removesuffix("weight")
                add_nvfp4(packed, module, tensors, "weight", "weight_scale_2", divided=False)
            elif tensor.info.dtype in DTYPES and name.endswith("weight"):
                add_fp8(packed, name, tensors, None, alone=False)
        packed.unused.update(name for name in tensors if name.endswith(CACHE_SCALES))
        return packed


def modelopt_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the format of `quant_method: modelopt`."""
    algorithm = stated.get("quant_algo")
    if algorithm not in ALGORITHMS:
        mistakes.append(f"modelopt: quant_algo is {shown(algorithm)}; wanted one of {ALGORITHMS}")
        return None
    return ModeloptFormat()


def add_nvfp4(
    packed: PackedTensors, module: str, tensors: Stored, values: str, whole: str, divided: bool
) -> None:
    """Note the weight of a module whose tensors are called `values` and, for the scale of all, `whole`, which
    multiplies or, where it is `divided`, divides the others."""
    stored = module + values, module + "weight_scale", module + whole
    if packed.lacks(stored[0], tensors, *stored[1:]):
        return
    codes, scales, one = (tensors[name].info for name in stored)
    outputs, held = codes.shape if len(codes.shape) == 2 else (0, 0)
    shape = outputs, 2 * held
    right = (codes.dtype, scales.dtype, one.dtype) == ("U8", "F8_E4M3", "F32") and one.shape in ((), (1,))
    right = right and scales.shape == (outputs, shape[1] // NVFP4_GROUP) and shape[1] % NVFP4_GROUP == 0
    packed.add(module + "weight", Nvfp4Tensor(shape, stored, divided), tensors, right)
    activations = (module + end for end in ("input_scale", "input_global_scale"))
    packed.unused.update(each for each in activations if each in tensors)


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor(PackedTensor):
    """A matrix stored as two values a byte (N, K / 2), scales (N, K / 16) in FP8, and one that multiplies these or,
    where it is `divided`, divides them."""

    format: ClassVar[str] = "nvfp4"

    divided: bool

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        from batchinfer.models.formats.codes import E2M1, looked_up, pairs_of

        values, scales, whole = map(read, self.stored)
        lines, one = scales.float(), whole.float().reshape(())
        lines = lines / one if self.divided else lines * one
        wide = looked_up(values, pairs_of(E2M1)).view(*lines.shape, NVFP4_GROUP)
        return wide.mul_(lines[..., None]).flatten(1)
