"""bitsandbytes checkpoints with 4-bit or 8-bit weights (Dettmers et al., 2023, "QLoRA"; 2022, "LLM.int8()").

nf4 and fp4 have a scale per block of the flattened matrix, and the scales may be quantised too. int8 has a scale per
output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.encoded_tensor import (
    EncodedTensor,
    EncodedTensors,
    Read,
    Shape,
    Stored,
    StoredFormat,
    is_float,
)

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("nf4", "fp4")
MAX_STATE_BYTES = 4096  # of the JSON of a 4-bit weight; bitsandbytes writes about 150
_MAX_CODE = 127.0


class BitsandbytesFormat(StoredFormat):
    """The format of bitsandbytes checkpoints, which finds their quantised weights.

    The names and dtypes of tensors show whether a weight has 4 or 8 bits.
    """

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the 4-bit and 8-bit weights among a checkpoint's tensors."""
        encoded = EncodedTensors()
        for name, tensor in tensors.items():
            for kind in KINDS:
                if name.endswith(end := f".quant_state.bitsandbytes__{kind}"):
                    _add_4bit(encoded, name.removesuffix(end), name, tensors)
            if tensor.info.dtype == "I8" and name.endswith(".weight"):
                _add_8bit(encoded, name, tensors)
        return encoded


def bitsandbytes_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: bitsandbytes`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message if neither `load_in_4bit` nor `load_in_8bit` is true.

    Returns:
        The format; None if neither is true.
    """
    if stated.get("load_in_4bit") or stated.get("load_in_8bit") or stated.get("_load_in_4bit"):
        return BitsandbytesFormat()
    mistakes.append(
        f"bitsandbytes: load_in_4bit is {shown(stated.get('load_in_4bit'))} and load_in_8bit "
        f"{shown(stated.get('load_in_8bit'))}; wanted true for load_in_4bit or load_in_8bit"
    )
    return None


@dataclass(frozen=True, slots=True)
class _State:
    shape: Shape
    block: int  # values that share a scale
    nested_block: int  # quantised scales that share a scale, or 0 if scales are floats
    offset: float  # added to each quantised scale


def _state_of(content: bytes) -> _State | None:
    try:
        stated = json.loads(content)
        state = _State(
            tuple(stated["shape"]),
            stated["blocksize"],
            stated.get("nested_blocksize", 0),
            float(stated.get("nested_offset", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    sizes = (*state.shape, state.block, state.nested_block)
    right = all(type(size) is int and 0 <= size < 2**40 for size in sizes) and state.block > 0
    return state if right and math.isfinite(state.offset) else None


def _add_4bit(encoded: EncodedTensors, name: str, state_name: str, tensors: Stored) -> None:
    nested = f"{name}.nested_absmax" in tensors
    ends = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
    needed = tuple(f"{name}.{end}" for end in ends)
    if encoded.lacks(state_name, tensors, name, *needed):
        return
    stored = (name, *needed, state_name)
    info = tensors[state_name].info
    content = tensors[state_name].content() if info.nbytes <= MAX_STATE_BYTES else b""
    state = _state_of(content)
    if state is None:
        encoded.mistakes.append(f"{state_name} is {shown(content)}; wanted the JSON of bitsandbytes")
        encoded.unused.update((*needed, state_name))
        return
    right = _fits(tensors, name, state, nested)
    found = Bits4Tensor(state.shape, stored, state.block, state.nested_block if nested else 0, state.offset)
    encoded.add(name, found, tensors, right)


def _fits(tensors: Stored, name: str, state: _State, nested: bool) -> bool:
    count = math.prod(state.shape)
    blocks = -(-count // state.block)
    codes, scales, table = (tensors[each].info for each in (name, f"{name}.absmax", f"{name}.quant_map"))
    right = codes.dtype == "U8" and codes.nbytes == -(-count // 2) and count % 2 == 0
    right = right and scales.shape == (blocks,) and (table.dtype, table.shape) == ("F32", (16,))
    if not nested:
        return right and scales.dtype == "F32"
    again, table = (tensors[f"{name}.{each}"].info for each in ("nested_absmax", "nested_quant_map"))
    right = right and scales.dtype == "U8" and (table.dtype, table.shape) == ("F32", (256,))
    right = right and state.nested_block > 0 and again.dtype == "F32"
    return right and again.shape == (-(-blocks // max(1, state.nested_block)),)


@dataclass(frozen=True, slots=True)
class Bits4Tensor(EncodedTensor):
    """A weight stored as 4-bit indices into a table of 16 floats, with a scale per block of values.

    The flattened indices are stored two per byte, the first in the upper bits. Scales are floats, or they are quantised
    too ("nested"): bytes that are indices into a table of 256 floats, with scales of their own.

    Attributes:
        block: Number of consecutive values that share a scale.
        nested_block: Number of quantised scales that share a scale. 0: scales are floats.
        offset: Number to add to each scale after dequantising it, if scales are quantised.
    """

    format: ClassVar[str] = "bitsandbytes of 4 bits"

    block: int
    nested_block: int
    offset: float

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 in its shape.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import byte_pairs, look_up_pairs, scale_blocks

        values, scales, table, *nested = (read(name) for name in self.stored[:-1])
        if nested:
            again, places = nested
            scales = scale_blocks(places[scales.int()], again, self.nested_block) + self.offset
        swapped = (values.flatten() << 4) | (values.flatten() >> 4)
        wide = look_up_pairs(swapped, byte_pairs(table.tolist()))
        return scale_blocks(wide, scales, self.block).view(self.shape)


def _add_8bit(encoded: EncodedTensors, name: str, tensors: Stored) -> None:
    module = name.removesuffix("weight")
    scales, layout = module + "SCB", module + "weight_format"
    if encoded.lacks(name, tensors, scales):
        return
    shape = tensors[name].info.shape
    right = len(shape) == 2 and is_float(tensors[scales]) and tensors[scales].info.shape == shape[:1]
    if layout in tensors:  # 0 means that outputs are rows; other layouts are for older GPUs
        right = right and tensors[layout].info.dtype == "U8" and tensors[layout].content() == b"\0"
        encoded.unused.add(layout)
    encoded.add(name, Bits8Tensor(shape, (name, scales)), tensors, right)


@dataclass(frozen=True, slots=True)
class Bits8Tensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) stored as int8, with the largest magnitude of each output's weights (N,).

    The scale of an output is this magnitude divided by 127.
    """

    format: ClassVar[str] = "bitsandbytes of 8 bits"

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): value * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales = map(read, self.stored)
        return values.float().mul_((scales.float() / _MAX_CODE)[:, None])
