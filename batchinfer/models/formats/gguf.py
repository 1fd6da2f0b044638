"""Weights of GGUF files of llama.cpp: blocks of quantised values that share scales, and floats in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from batchinfer.core.gguf.header import GgmlType
from batchinfer.models.files.weight_files import FLOAT_DTYPES, StoredTensor
from batchinfer.models.formats.encoded_tensor import Codes, EncodedTensor, Read, int4_form
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

# Types with 4-bit values in groups of 32 inputs that share a scale, and True if a group also has an offset
_INT4 = {"Q4_0": False, "Q4_1": True, "Q4_K": True}
_GROUP, _LEAST = 32, -8
_AT_ONCE = 1 << 22  # values to unpack at a time, which limits temporary memory


@dataclass(frozen=True, slots=True)
class GgufWeight(EncodedTensor):
    """A weight that is stored in a GGUF file, as quantised blocks or as floats in another order.

    Attributes:
        type: The storage type of ggml, such as Q4_K.
        heads: The number of heads, if the rows of each head must be reordered: the file stores the two rows that are
            rotated together next to each other. 0: rows are in order.
        less: A number to subtract from each value, because the file has added it, as to the weights of Gemma's norms.
    """

    format: ClassVar[str] = "GGUF"

    type: GgmlType
    heads: int = 0
    less: float = 0.0

    @property
    def quantized(self) -> bool:
        """Return True if the values are stored as quantised blocks rather than floats."""
        return self.type.name not in FLOAT_DTYPES

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int4 for Q4_0, Q4_1 and Q4_K if `less` is 0.

        Returns None if they must be dequantised.
        """
        offset = _INT4.get(self.type.name)
        return None if offset is None or self.less else int4_form(_GROUP, whole_zeros=not offset)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, int8 from -8 to 7, with their scales and zero points.

        Values are (outputs, inputs), scales and zero points (outputs, groups).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        import torch

        from batchinfer.models.formats.gguf_blocks import split_blocks

        stored = self._in_order(read(self.stored[0]))
        codes, scales, offsets = split_blocks(stored.view(-1, self.type.size), self.type.name)
        shape, lines = self.shape, scales.view(self.shape[0], -1)
        if offsets is None:
            return Codes(codes.reshape(shape), lines)
        one = scales == 0  # groups of equal weights, which are stored only as an offset
        codes.masked_fill_(one[..., None], 0)
        lines = scales.masked_fill_(one, 1.0).view(shape[0], -1)
        values = codes.reshape(shape).to(torch.int8).add_(_LEAST)
        return Codes(values, lines, zeros=offsets.view(shape[0], -1).div(lines).add_(_LEAST))

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the tensor and convert it to float32, with rows reordered and `less` subtracted.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        import torch

        stored = self._in_order(read(self.stored[0]))
        if not self.quantized:
            return stored.float() - self.less
        found = torch.empty(self.shape)
        step = max(1, _AT_ONCE // self.shape[-1])
        for start in range(0, len(found), step):
            rows = found[start : start + step]
            rows.copy_(self._values(stored[start : start + step]).view(rows.shape))
        return found.sub_(self.less) if self.less else found

    def _values(self, rows: Tensor) -> Tensor:
        from batchinfer.models.formats.gguf_blocks import split_blocks

        return split_blocks(rows.reshape(-1, self.type.size), self.type.name).values()

    def _in_order(self, stored: Tensor) -> Tensor:
        if not self.heads:
            return stored
        pairs = stored.view(self.heads, -1, 2, *stored.shape[1:])
        return pairs.transpose(1, 2).reshape(stored.shape)


@dataclass(frozen=True, slots=True)
class GgufExperts(EncodedTensor):
    """A family's weight of all experts, (experts, inputs, outputs), which a GGUF file stores as one or two tensors.

    Attributes:
        parts: For each tensor of the file, the matrix (outputs, inputs) of each expert. The family's outputs alternate
            between the tensors, such as gate and up.
    """

    format: ClassVar[str] = "GGUF"

    parts: tuple[tuple[GgufWeight, ...], ...]

    @property
    def matrices(self) -> bool:
        """Return True: the weight is a stack with a matrix per expert, so matrices can be read one at a time."""
        return True

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32.

        Args:
            read: Returns a stored tensor by name.
            index: The number of an expert, for a result (inputs, outputs). None: all experts, (experts, inputs,
                outputs).
        """
        import torch

        if index is None:
            return torch.stack([self.dequantize(read, expert) for expert in range(self.shape[0])])
        rows = [part[index].dequantize(read) for part in self.parts]
        return torch.stack(rows, 1).flatten(0, 1).t()


@dataclass(frozen=True, slots=True)
class GgufBiases(EncodedTensor):
    """A family's biases of all experts, (experts, outputs). Outputs alternate between the tensors of a GGUF file."""

    format: ClassVar[str] = "GGUF"

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the biases as float32 (experts, outputs).

        Args:
            read: Returns a stored tensor by name.
            index: Not used.
        """
        import torch

        return torch.stack([read(name).float() for name in self.stored], -1).flatten(-2)


def read_stored(tensor: StoredTensor) -> Tensor:
    """Read a tensor of a GGUF file: floats in their shape, or quantised blocks as bytes, (rows, bytes per row) uint8.

    The file is not memory-mapped, since a file that is truncated later would then crash the process.
    """
    import numpy as np
    import torch

    info = tensor.info
    raw = torch.from_numpy(np.fromfile(tensor.file, np.uint8, info.nbytes, offset=info.start))
    if info.dtype in FLOAT_DTYPES:
        return raw.view(getattr(torch, FLOAT_DTYPES[info.dtype])).view(info.shape)
    return raw.view(info.shape[0], -1)
