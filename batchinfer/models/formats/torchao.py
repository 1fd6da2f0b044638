"""torchao checkpoints as transformers saves them: integers and 8-bit floats.

The header of a safetensors file names the class of each weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.files.safetensors_header import read_metadata
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.encoded_tensor import (
    Codes,
    EncodedTensor,
    EncodedTensors,
    Read,
    Stored,
    StoredFormat,
    int4_form,
    is_float,
)
from batchinfer.models.formats.fp8 import DTYPES, Fp8Tensor, block_of, is_block
from batchinfer.models.formats.integers import Int8Tensor
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

NAME = "torchao"
_PLAIN = "Tensor"
_VALUES, _SCALES, _ZEROS = "qdata", "scale", "zero_point"
_SMOOTHED = "act_pre_scale"
_PARTS = (_VALUES, _SCALES, _ZEROS, _SMOOTHED, "scale_and_zero", "per_tensor_scale")


class TorchaoFormat(StoredFormat):
    """The format of torchao checkpoints, which finds their quantised weights.

    The headers of the safetensors files name torchao's class of each weight.
    """

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the quantised weights that the headers of the files describe.

        A quantised tensor that no header describes adds an error message.

        Args:
            tensors: All tensors of the checkpoint by name.
        """
        encoded = EncodedTensors()
        stated = _stated(tensors)
        for name, said in stated.items():
            if said.get("_type") != _PLAIN:
                _add(encoded, name, said, tensors)
        for name in tensors:
            module, mark, part = name.rpartition("._")
            weight = f"{module}.{part.removesuffix(f'_{_VALUES}')}"
            if mark and part.endswith(f"_{_VALUES}") and weight not in stated:
                encoded.mistakes.append(f"{name} is quantised, but the header does not describe {weight}")
                encoded.unused.update(each for each in tensors if each.startswith(_start(weight)))
        return encoded


def torchao_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat:
    """Return the format for `quant_method: torchao`. Both arguments are ignored.

    `quant_type` of config.json describes how torchao would quantise. The headers of the safetensors files describe the
    stored weights.
    """
    return TorchaoFormat()


def _stated(tensors: Stored) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for file in sorted({tensor.file for tensor in tensors.values()}):
        for name, text in read_metadata(file).items():
            said = _object(text)
            if said is not None and "_type" in said and _held(name, tensors):
                found[name] = said
    return found


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # plain text, such as "pt"
        return None
    return found if isinstance(found, dict) else None


def _start(name: str) -> str:
    """Return the prefix of the names of a weight's stored tensors: "a._weight_" for "a.weight"."""
    module, _, leaf = name.rpartition(".")
    return f"{module}._{leaf}_"


def _held(name: str, tensors: Stored) -> bool:
    # Parts of a model that are not loaded have no tensors here
    return name in tensors or any(_start(name) + part in tensors for part in _PARTS)


def _add(encoded: EncodedTensors, name: str, said: Mapping[str, Any], tensors: Stored) -> None:
    # Tensors of an unsupported weight become unused, so they are reported only once
    kind, start, data = said.get("_type"), _start(name), said.get("_data")
    add = _CLASSES.get(kind) if isinstance(kind, str) else None
    if add is None:
        encoded.mistakes.append(f"{name} is a {shown(kind)} of torchao; {', '.join(_CLASSES)} are read")
    elif start + _SMOOTHED in tensors:
        encoded.mistakes.append(
            f"{name} has {start + _SMOOTHED}, by which inputs are multiplied; that is not read"
        )
    elif not encoded.lacks(name, tensors, start + _VALUES, start + _SCALES):
        add(encoded, name, data if isinstance(data, Mapping) else {}, tensors)
    read = encoded.found[name].stored if name in encoded.found else ()
    encoded.unused.update(each for each in tensors if each.startswith(start) and each not in read)


def _alone(data: Mapping[str, Any]) -> bool:
    return data.get("act_quant_kwargs") is None


def _add_fp8(encoded: EncodedTensors, name: str, data: Mapping[str, Any], tensors: Stored) -> None:
    values, scales = stored = _start(name) + _VALUES, _start(name) + _SCALES
    info, stated = tensors[values].info, data.get("block_size")
    block = (stated[0], stated[1]) if isinstance(stated, list) and is_block(stated) else None
    fitting = block_of(info.shape, tensors[scales].info.shape, block)
    right = info.dtype in DTYPES and fitting is not None and is_float(tensors[scales])
    encoded.add(
        name, Fp8Tensor(info.shape, stored, fitting or None, info.dtype, _alone(data)), tensors, right
    )


def _add_int8(encoded: EncodedTensors, name: str, data: Mapping[str, Any], tensors: Stored) -> None:
    stored, lines, right = _parts(name, tensors)
    shape = tensors[stored[0]].info.shape
    encoded.add(name, Int8Tensor(shape, stored, lines, _alone(data)), tensors, right)


def _add_intx(encoded: EncodedTensors, name: str, data: Mapping[str, Any], tensors: Stored) -> None:
    stored, lines, right = _parts(name, tensors)
    shape = tensors[stored[0]].info.shape
    target = data.get("target_dtype")
    few = isinstance(target, Mapping) and target.get("_data") in ("int1", "int2", "int3", "int4")
    group = shape[1] // lines[1] if right and lines[1] else 0
    encoded.add(name, IntxTensor(shape, stored, group if few else 0), tensors, right)


def _parts(name: str, tensors: Stored) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    # torchao also stores zero points of symmetric weights; those per output that are all 0 are left out
    values, scales, zeros = (_start(name) + part for part in (_VALUES, _SCALES, _ZEROS))
    info, lines = tensors[values].info, tensors[scales].info.shape
    right = info.dtype == "I8" and len(info.shape) == len(lines) == 2 and is_float(tensors[scales])
    right = right and lines[0] == info.shape[0] and lines[1] > 0 and info.shape[1] % lines[1] == 0
    offsets = tensors.get(zeros)
    if offsets is None or ((offsets.info.dtype, offsets.info.shape) == ("I8", lines) and _all_zero(offsets)):
        return (values, scales), lines, right
    fits = offsets.info.shape == lines and (offsets.info.dtype == "I8" or is_float(offsets))
    return (values, scales, zeros), lines, right and fits


def _all_zero(zeros: StoredTensor) -> bool:
    # Zero points of groups are too large to be read here
    return zeros.info.shape[-1:] == (1,) and not any(zeros.content())


def _add_int4(encoded: EncodedTensors, name: str, _: Mapping[str, Any], tensors: Stored) -> None:
    values, scales, zeros = stored = tuple(_start(name) + part for part in (_VALUES, _SCALES, _ZEROS))
    if encoded.lacks(values, tensors, zeros):
        return
    info, lines = tensors[values].info, tensors[scales].info.shape
    outputs, inputs = (info.shape[0], 2 * info.shape[1]) if len(info.shape) == 2 else (0, 0)
    right = info.dtype in ("I8", "U8") and len(lines) == 2 and lines[1] == outputs and lines[0] > 0
    right = right and inputs % lines[0] == 0 and tensors[zeros].info.shape == lines
    right = right and is_float(tensors[scales]) and is_float(tensors[zeros])
    group = inputs // lines[0] if right else 0
    encoded.add(name, TorchaoInt4((outputs, inputs), stored, group), tensors, right)


_CLASSES: Mapping[str, Callable[[EncodedTensors, str, Mapping[str, Any], Stored], None]] = {
    "Float8Tensor": _add_fp8,
    "Int8Tensor": _add_int8,
    "IntxUnpackedToInt8Tensor": _add_intx,
    "Int4Tensor": _add_int4,
}


@dataclass(frozen=True, slots=True)
class IntxTensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) stored as bytes, with scales and optional zero points (N, groups).

    Attributes:
        group: Number of inputs that share a scale, if values have at most 4 bits. 0: they have more, so they must be
            dequantised.
    """

    format: ClassVar[str] = NAME

    group: int

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int4 in groups.

        Returns None if they must be dequantised.
        """
        return int4_form(self.group)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values as int8 (outputs, inputs), with scales and zero points (outputs, groups).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales, *zeros = map(read, self.stored)
        return Codes(values, scales.float(), zeros=zeros[0].float() if zeros else None)

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): (value - zero point) * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import apply_scales

        values, scales, *zeros = map(read, self.stored)
        return apply_scales(values.t(), scales.t(), zeros[0].t() if zeros else None).t()


@dataclass(frozen=True, slots=True)
class TorchaoInt4(EncodedTensor):
    """A weight matrix (N outputs, K inputs) stored as 4-bit values from -8 to 7. A weight is value * scale + offset.

    Three tensors store it: values (N, K / 2), two per byte, the first in the lower bits; scales (groups, N); and
    offsets (groups, N).

    Attributes:
        group: Number of inputs that share a scale and an offset.
    """

    format: ClassVar[str] = NAME

    group: int

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int4 with fractional zero points.

        Returns None if they must be dequantised, as operators do not support groups of this size.
        """
        return int4_form(self.group, whole_zeros=False)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values as int8 (outputs, inputs), with scales and zero points (outputs, groups).

        A zero point is -offset / scale, which is usually not an integer. If the scale of a group is 0, all its weights
        are the offset. Such a group gets the values 1, the offset as scale, and the zero point 0.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales, offsets = self._read(read)
        empty = scales == 0
        values = values.masked_fill(empty.repeat_interleave(self.group, 1), 1)
        lines = scales.where(~empty, offsets)
        zeros = offsets.neg().div(scales).masked_fill_(empty, 0.0)
        return Codes(values, lines, zeros=zeros)

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): value * scale + offset.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales, offsets = self._read(read)
        found = values.float().view(len(values), -1, self.group)
        return found.mul_(scales[..., None]).add_(offsets[..., None]).flatten(1)

    def _read(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        values, scales, offsets = map(read, self.stored)
        pairs = values.view(torch.int8)
        codes = torch.stack((pairs << 4 >> 4, pairs >> 4), -1).flatten(1)  # shifts to the right keep the sign
        return codes, scales.t().float(), offsets.t().float()
