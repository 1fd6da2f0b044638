"""A part of a tensor of a GGUF file, as a stored tensor."""

from __future__ import annotations

from batchinfer.core.gguf.header import GgufTensor
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import StoredTensor


def part_of(tensor: GgufTensor, shape: tuple[int, ...], number: int = 0, parts: int = 1) -> StoredTensor:
    """Return one of equal parts of a tensor, of this shape; its place is one in the whole file."""
    size = (tensor.end - tensor.start) // parts
    start = tensor.start + number * size
    return StoredTensor(tensor.file, TensorInfo(tensor.type.name, shape, start, start + size))
