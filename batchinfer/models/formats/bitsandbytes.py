"""bitsandbytes (Dettmers et al., 2023, "QLoRA"; 2022, "LLM.int8()"): nf4 and fp4 in blocks of a flattened matrix, whose
scales may be quantised again, and int8 with a scale for each output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.packed_tensor import (
    PackedTensor,
    PackedTensors,
    Read,
    Shape,
    Stored,
    StoredFormat,
    is_float,
)

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("nf4", "fp4")
MAX_STATE_BYTES = 4096  # of the JSON beside a matrix; bitsandbytes writes some 150
_MAX_CODE = 127.0


class BitsandbytesFormat(StoredFormat):
    """Weights of bitsandbytes, whose bits their tensors show."""

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        for name, tensor in tensors.items():
            for kind in KINDS:
                if name.endswith(end := f".quant_state.bitsandbytes__{kind}"):
                    _add_4bit(packed, name.removesuffix(end), name, tensors)
            if tensor.info.dtype == "I8" and name.endswith(".weight"):
                _add_8bit(packed, name, tensors)
        return packed


def bitsandbytes_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the format of `quant_method: bitsandbytes`."""
    if stated.get("load_in_4bit") or stated.get("load_in_8bit") or stated.get("_load_in_4bit"):
        return BitsandbytesFormat()
    mistakes.append(
        f"bitsandbytes: load_in_4bit is {shown(stated.get('load_in_4bit'))} and load_in_8bit "
        f"{shown(stated.get('load_in_8bit'))}; wanted one of them to be true"
    )
    return None


@dataclass(frozen=True, slots=True)
class _State:
    """The sizes that the JSON beside a matrix of 4 bits states."""

    shape: Shape
    block: int  # values that share a scale
    nested_block: int  # scales that share one; 0: they are floats
    offset: float  # added to quantised scales


def _state_of(content: bytes) -> _State | None:
    """Return what the JSON says; None if it is not right."""
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


def _add_4bit(packed: PackedTensors, name: str, state_name: str, tensors: Stored) -> None:
    """Note the weight `name` of 4 bits."""
    nested = f"{name}.nested_absmax" in tensors
    ends = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
    needed = tuple(f"{name}.{end}" for end in ends)
    if packed.lacks(state_name, tensors, name, *needed):
        return
    stored = (name, *needed, state_name)
    info = tensors[state_name].info
    content = tensors[state_name].content() if info.nbytes <= MAX_STATE_BYTES else b""
    state = _state_of(content)
    if state is None:
        packed.mistakes.append(f"{state_name} is {shown(content)}; wanted the JSON of bitsandbytes")
        packed.unused.update((*needed, state_name))
        return
    right = _fits(tensors, name, state, nested)
    found = Bits4Tensor(state.shape, stored, state.block, state.nested_block if nested else 0, state.offset)
    packed.add(name, found, tensors, right)


def _fits(tensors: Stored, name: str, state: _State, nested: bool) -> bool:
    """Whether the tensors of a weight have the sizes that its state says."""
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
class Bits4Tensor(PackedTensor):
    """A tensor whose values lie in one row, two a byte, the first in the upper bits: places in a table of 16 numbers,
    multiplied with a scale for each `block` of them. With a `nested_block` scales are places in a table of 256, scaled
    in blocks of that many, and `offset` is added."""

    format: ClassVar[str] = "bitsandbytes of 4 bits"

    block: int
    nested_block: int
    offset: float

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        from batchinfer.models.formats.codes import blockwise, looked_up, pairs_of

        values, scales, table, *nested = (read(name) for name in self.stored[:-1])
        if nested:
            again, places = nested
            scales = blockwise(places[scales.int()], again, self.nested_block) + self.offset
        swapped = (values.flatten() << 4) | (values.flatten() >> 4)
        wide = looked_up(swapped, pairs_of(table.tolist()))
        return blockwise(wide, scales, self.block).view(self.shape)


def _add_8bit(packed: PackedTensors, name: str, tensors: Stored) -> None:
    """Note a weight of 8 bits, whose scales are the largest magnitudes of its outputs."""
    module = name.removesuffix("weight")
    scales, layout = module + "SCB", module + "weight_format"
    if packed.lacks(name, tensors, scales):
        return
    shape = tensors[name].info.shape
    right = len(shape) == 2 and is_float(tensors[scales]) and tensors[scales].info.shape == shape[:1]
    if layout in tensors:  # 0: outputs are rows; others are of older GPUs
        right = right and tensors[layout].info.dtype == "U8" and tensors[layout].content() == b"\0"
        packed.unused.add(layout)
    packed.add(name, Bits8Tensor(shape, (name, scales)), tensors, right)


@dataclass(frozen=True, slots=True)
class Bits8Tensor(PackedTensor):
    """A matrix (N, K) stored as int8, and 127 times its scales (N,)."""

    format: ClassVar[str] = "bitsandbytes of 8 bits"

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        values, scales = map(read, self.stored)
        return values.float().mul_((scales.float() / _MAX_CODE)[:, None])
