"""NVFP4 weights, as compressed-tensors and NVIDIA's Model Optimizer store them.

Groups of 16 4-bit floats (E2M1) share an FP8 scale, and the whole tensor has one more scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.encoded_tensor import EncodedTensor, EncodedTensors, Read, Stored, StoredFormat
from batchinfer.models.formats.fp8 import CACHE_SCALES, DTYPES, add_fp8

if TYPE_CHECKING:
    from torch import Tensor

NVFP4_GROUP = 16
ALGORITHMS = ("NVFP4", "FP8")


class ModeloptFormat(StoredFormat):
    """The format of NVIDIA Model Optimizer checkpoints, which finds their quantised weights.

    The tensors that a weight has show whether it is NVFP4 or FP8.
    """

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the NVFP4 and FP8 weights among a checkpoint's tensors."""
        encoded = EncodedTensors()
        for name, tensor in tensors.items():
            if name + "_scale_2" in tensors:
                module = name.removesuffix("weight")
                add_nvfp4(encoded, module, tensors, "weight", "weight_scale_2", divided=False)
            elif tensor.info.dtype in DTYPES and name.endswith("weight"):
                add_fp8(encoded, name, tensors, None, alone=False)
        encoded.unused.update(name for name in tensors if name.endswith(CACHE_SCALES))
        return encoded


def modelopt_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: modelopt`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message if `quant_algo` is unsupported.

    Returns:
        The format; None if it is unsupported.
    """
    algorithm = stated.get("quant_algo")
    if algorithm not in ALGORITHMS:
        mistakes.append(f"modelopt: quant_algo is {shown(algorithm)}; wanted one of {ALGORITHMS}")
        return None
    return ModeloptFormat()


def add_nvfp4(
    encoded: EncodedTensors, module: str, tensors: Stored, values: str, whole: str, divided: bool
) -> None:
    """Add the NVFP4 weight of a module to `encoded`. If its tensors are missing or do not fit, add an error message.

    Args:
        encoded: The quantised weights of the checkpoint that were found so far.
        module: The module's name, with a dot at its end.
        tensors: All tensors of the checkpoint.
        values: The name of the tensor with the values, without `module`.
        whole: The name of the tensor with the scale of the whole weight, without `module`.
        divided: True if the scales of groups must be divided by the scale of the whole weight, False if they must be
            multiplied by it.
    """
    stored = module + values, module + "weight_scale", module + whole
    if encoded.lacks(stored[0], tensors, *stored[1:]):
        return
    codes, scales, one = (tensors[name].info for name in stored)
    outputs, held = codes.shape if len(codes.shape) == 2 else (0, 0)
    shape = outputs, 2 * held
    right = (codes.dtype, scales.dtype, one.dtype) == ("U8", "F8_E4M3", "F32") and one.shape in ((), (1,))
    right = right and scales.shape == (outputs, shape[1] // NVFP4_GROUP) and shape[1] % NVFP4_GROUP == 0
    encoded.add(module + "weight", Nvfp4Tensor(shape, stored, divided), tensors, right)
    activations = (module + end for end in ("input_scale", "input_global_scale"))
    encoded.unused.update(each for each in activations if each in tensors)


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) that is stored in NVFP4.

    Three tensors store it: values (N, K / 2), two per byte; FP8 scales of groups (N, K / 16); and a scale of the whole
    weight.

    Attributes:
        divided: True if the scales of groups must be divided by the scale of the whole weight, False if they must be
            multiplied by it.
    """

    format: ClassVar[str] = "nvfp4"

    divided: bool

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import E2M1, byte_pairs, look_up_pairs

        values, scales, whole = map(read, self.stored)
        lines, one = scales.float(), whole.float().reshape(())
        lines = lines / one if self.divided else lines * one
        wide = look_up_pairs(values, byte_pairs(E2M1)).view(*lines.shape, NVFP4_GROUP)
        return wide.mul_(lines[..., None]).flatten(1)
