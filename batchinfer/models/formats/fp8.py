"""8-bit float weights with a scale per tensor, output or block (DeepSeek-AI, 2024, "DeepSeek-V3")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.formats.encoded_tensor import (
    Codes,
    EncodedTensor,
    EncodedTensors,
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
# Endings of the names of a weight's scales, and of its module's activation scales, which dequantised weights ignore
_SCALES, _ACTIVATIONS = ("_scale_inv", "_scale"), ("input_scale", "activation_scale")
# Attention scales for a quantised KV cache. They are ignored: the cache computes its own (docs/models.md).
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")


@dataclass(frozen=True, slots=True)
class Fp8Format(StoredFormat):
    """The format of checkpoints with 8-bit float weights, which finds these weights.

    Attributes:
        block: Rows and columns that share a scale. None: scales are not per block.
        alone: True if weights must be multiplied with unquantised activations.
    """

    block: tuple[int, int] | None = None
    alone: bool = False

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the 8-bit float weights among a checkpoint's tensors."""
        encoded = EncodedTensors()
        for name, tensor in tensors.items():
            if tensor.info.dtype in DTYPES:
                add_fp8(encoded, name, tensors, self.block, self.alone)
        encoded.unused.update(name for name in tensors if name.endswith(CACHE_SCALES))
        return encoded


def fp8_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: fp8` or `fbgemm_fp8`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message if `weight_block_size` is invalid.

    Returns:
        The format; None if it is invalid.
    """
    block = stated.get("weight_block_size")
    if block is not None and not is_block(block):
        mistakes.append(f"weight_block_size is {shown(block)}; wanted two numbers above 0")
        return None
    return Fp8Format(None if block is None else (block[0], block[1]))


def is_block(value: object) -> bool:
    """Return True if a value of config.json is a list of two positive integers, rows and columns."""
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def add_fp8(
    encoded: EncodedTensors, name: str, tensors: Stored, block: tuple[int, int] | None, alone: bool
) -> None:
    """Add an 8-bit float weight to `encoded`. If its scales are missing or do not fit, add an error message.

    Args:
        encoded: The quantised weights of the checkpoint that were found so far.
        name: The name of the tensor with the values; its scales are `name` + "_scale_inv" or "_scale".
        tensors: All tensors of the checkpoint.
        block: Rows and columns that share a scale. None: no weight has scales per block.
        alone: True if the weight must be multiplied with unquantised activations.
    """
    scales = next((name + end for end in _SCALES if name + end in tensors), None)
    if scales is None:
        encoded.mistakes.append(f"{name} is FP8, and its scales {name}{_SCALES[0]} are missing")
        return
    values, scale = tensors[name].info, tensors[scales].info
    fitting = block_of(values.shape, scale.shape, block)
    right = fitting is not None and scale.dtype in SCALE_DTYPES
    stored = Fp8Tensor(values.shape, (name, scales), fitting or None, values.dtype, alone)
    encoded.add(name, stored, tensors, right)
    module = name.removesuffix("weight")
    encoded.unused.update(found for end in _ACTIVATIONS if (found := module + end) in tensors)


def block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | tuple[()] | None:
    """Return the number of rows and columns of a weight that share a scale.

    Args:
        shape: The shape of the quantised values.
        scales: The shape of the scales.
        block: The rows and columns that config.json states. None: it states none.

    Returns:
        (rows, columns); () if the whole tensor has one scale; None if the scales do not fit.
    """
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
class Fp8Tensor(EncodedTensor):
    """A weight stored as 8-bit floats with scales.

    Attributes:
        block: (rows, columns) that share a scale; (1, inputs) if each output has a scale. None: the whole tensor has
            one scale.
        dtype: Dtype of the values in safetensors notation.
        alone: True if the weight must be multiplied with unquantised activations.
    """

    format: ClassVar[str] = "fp8"

    block: tuple[int, int] | None = None
    dtype: str = DTYPES[0]
    alone: bool = False

    @property
    def matrices(self) -> bool:
        """Return True if the tensor may be a stack of experts' matrices, which can be read one at a time.

        This requires a single scale for the whole tensor.
        """
        return self.block is None

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: fp8 with a scale per output or block.

        Returns None if they must be dequantised. This holds for E5M2, for tensors that are no matrices, for blocks of
        other than 128 columns, and if activations must not be quantised.
        """
        if self.dtype != DTYPES[0] or len(self.shape) != 2 or self.alone:
            return None
        if self.block is None or self.block == (1, self.shape[1]):
            return WeightForm("fp8", "channel", stored=True)
        return WeightForm("fp8", "block", stored=True) if self.block[1] == PRODUCT_GROUP else None

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32.

        Args:
            read: Returns a stored tensor by name.
            index: The number of a matrix, if the weight is a stack of matrices. None: the whole weight.
        """
        values, scales = map(read, self.stored)
        return fp8_values(values if index is None else values[index], scales, self.block)

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: The number of a matrix, if the weight is a stack of matrices. None: it is a single matrix.

        Raises:
            CannotSplit: A range begins or ends within a block that shares a scale.
        """
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
        """Read the quantised values, (outputs, inputs), and their scales: (outputs,), or (row blocks, column blocks).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales = map(read, self.stored)
        high = 1 if self.block is None else self.block[0]
        if self.block is None or (self.block[1] == values.shape[1] and high == 1):
            return Codes(values, scales.float().reshape(-1).expand(len(values)))
        return Codes(values, scales.float(), high)


def fp8_values(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return 8-bit floats multiplied with their scales, as float32 in the same shape.

    Args:
        values: (N, K), or any shape if `block` is None.
        scales: One scale, or (row blocks, column blocks).
        block: (rows, columns) that share a scale. None: all values share one.
    """
    from torch.nn.functional import pad  # slow, and not needed to check a checkpoint

    wide, scales = values.float(), scales.float()
    if block is None:
        return wide.mul_(scales.reshape(()))
    rows, columns = wide.shape
    high, broad = block
    missing = (0, -columns % broad, 0, -rows % high)  # to complete the last blocks
    whole = pad(wide, missing) if any(missing) else wide
    blocks = whole.view(whole.shape[0] // high, high, -1, broad)
    blocks.mul_(scales.view(len(blocks), 1, -1, 1))
    return whole[:rows, :columns]
