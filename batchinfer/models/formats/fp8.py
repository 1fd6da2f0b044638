"""8-bit floats with a scale for a whole tensor, each output, or each block (DeepSeek-AI, 2024, "DeepSeek-V3")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.formats.packed_tensor import (
    Codes,
    PackedTensor,
    PackedTensors,
    Read,
    Slices,
    Span,
    Stored,
    StoredFormat,
    words_of,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0")
PRODUCT_GROUP = 128  # inputs that share a scale where products are computed of quantised values
# Of a weight, its scales; of its module, those of activations, which stay as they are once weights are dequantised
_SCALES, _ACTIVATIONS = ("_scale_inv", "_scale"), ("input_scale", "activation_scale")
# Scales of attention for a quantised cache; a job's cache computes its own (docs/models.md)
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")


@dataclass(frozen=True, slots=True)
class Fp8Format(StoredFormat):
    """Weights in FP8. `block`: rows and columns that share a scale where there is one for each block. `alone`:
    activations are not to be quantised."""

    block: tuple[int, int] | None = None
    alone: bool = False

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        for name, tensor in tensors.items():
            if tensor.info.dtype in DTYPES:
                add_fp8(packed, name, tensors, self.block, self.alone)
        packed.unused.update(name for name in tensors if name.endswith(CACHE_SCALES))
        return packed


def fp8_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the format of `quant_method: fp8` and `fbgemm_fp8`."""
    block = stated.get("weight_block_size")
    if block is not None and not is_block(block):
        mistakes.append(f"weight_block_size is {shown(block)}; wanted two numbers above 0")
        return None
    return Fp8Format(None if block is None else (block[0], block[1]))


def is_block(value: object) -> bool:
    """Whether a value of config.json is a number of rows and one of columns."""
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def add_fp8(
    packed: PackedTensors, name: str, tensors: Stored, block: tuple[int, int] | None, alone: bool
) -> None:
    """Note a tensor in FP8 and its scales, or what is wrong with them."""
    scales = next((name + end for end in _SCALES if name + end in tensors), None)
    if scales is None:
        packed.mistakes.append(f"{name} is FP8, and its scales {name}{_SCALES[0]} are missing")
        return
    values, scale = tensors[name].info, tensors[scales].info
    fitting = block_of(values.shape, scale.shape, block)
    right = fitting is not None and scale.dtype in SCALE_DTYPES
    stored = Fp8Tensor(values.shape, (name, scales), fitting or None, values.dtype, alone)
    packed.add(name, stored, tensors, right)
    module = name.removesuffix("weight")
    packed.unused.update(found for end in _ACTIVATIONS if (found := module + end) in tensors)


def block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | tuple[()] | None:
    """Return the shape of the block that a scale belongs to; () for the whole tensor; None if the scales do not fit."""
    if all(size == 1 for size in scales):
        return ()
    if len(shape) != 2:
        return None
    if scales in ((shape[0],), (shape[0], 1)):
        return 1, max(1, shape[1])
    if block is None or scales != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        return None
    return block


@dataclass(frozen=True, slots=True)
class Fp8Tensor(PackedTensor):
    """Values in FP8, whose scales hold for a `block` (rows, columns) each; None: one for all. `alone`: as in
    Fp8Format."""

    format: ClassVar[str] = "fp8"

    block: tuple[int, int] | None = None
    dtype: str = DTYPES[0]
    alone: bool = False

    @property
    def matrices(self) -> bool:
        return self.block is None

    @property
    def form(self) -> WeightForm | None:
        if self.dtype != DTYPES[0] or len(self.shape) != 2 or self.alone:
            return None
        if self.block is None or self.block == (1, self.shape[1]):
            return WeightForm("fp8", "channel", stored=True)
        return WeightForm("fp8", "block", stored=True) if self.block[1] == PRODUCT_GROUP else None

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        values, scales = map(read, self.stored)
        return fp8_values(values if index is None else values[index], scales, self.block)

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        of_matrix = (slice(*outputs), slice(*inputs))
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        values, scales = self.stored
        if self.block is None:
            one = () if index is None else (slice(index, index + 1),)
            return replace(self, shape=(*(1 for _ in one), *shape)), {values: (*one, *of_matrix)}
        high, broad = self.block
        if self.block == (1, self.shape[1]):
            return replace(self, shape=shape, block=(1, shape[1])), {
                values: of_matrix,
                scales: (of_matrix[0],),
            }
        rows, columns = words_of(outputs, high, self.shape[0]), words_of(inputs, broad, self.shape[1])
        return replace(self, shape=shape), {values: of_matrix, scales: (rows, columns)}

    def codes(self, read: Read, index: int | None = None) -> Codes:
        values, scales = map(read, self.stored)
        high = 1 if self.block is None else self.block[0]
        if self.block is None or (self.block[1] == values.shape[1] and high == 1):
            return Codes(values, scales.float().reshape(-1).expand(len(values)))
        return Codes(values, scales.float(), high)


def fp8_values(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """values: (N, K), or any shape where `block` is None: one scale for all → float32."""
    from torch.nn.functional import pad  # slow, and not needed to check a checkpoint

    wide, scales = values.float(), scales.float()
    if block is None:
        return wide.mul_(scales.reshape(()))
    rows, columns = wide.shape
    high, broad = block
    missing = (0, -columns % broad, 0, -rows % high)  # of the last blocks
    whole = pad(wide, missing) if any(missing) else wide
    blocks = whole.view(whole.shape[0] // high, high, -1, broad)
    blocks.mul_(scales.view(len(blocks), 1, -1, 1))
    return whole[:rows, :columns]
