"""The tensors of experts that a family has in one tensor with gate and up by turns, and GGUF in several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from batchinfer.core.gguf.header import GgufTensor
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.gguf import GgufBiases, GgufExperts, GgufWeight
from batchinfer.models.formats.packed_tensor import PackedTensor

_NAME = re.compile(r"blk\.(?P<number>\d+)\.ffn_(?:(?:gate|up)_exps\.(?:weight|bias)|down_exps\.weight)")
# What a family calls the matrices of its experts, and the tensors that hold their rows by turns
_MATRICES = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def part_of(tensor: GgufTensor, shape: tuple[int, ...], number: int = 0, parts: int = 1) -> StoredTensor:
    """Return one of equal parts of a tensor, of this shape; its place is one in the whole file."""
    size = (tensor.end - tensor.start) // parts
    start = tensor.start + number * size
    return StoredTensor(tensor.file, TensorInfo(tensor.type.name, shape, start, start + size))


def is_joined(name: str) -> bool:
    """Whether a tensor is one of several that are joined."""
    return _NAME.fullmatch(name) is not None


def joined_experts(
    tensors: Mapping[str, GgufTensor],
) -> Iterator[tuple[str, PackedTensor, dict[str, StoredTensor]]]:
    """Yield the family's tensors by name, and what lies under the names that they are made of."""
    numbers = sorted({int(found["number"]) for name in tensors if (found := _NAME.fullmatch(name))})
    for number in numbers:
        start, ours = f"blk.{number}.ffn_", f"model.layers.{number}.mlp.experts."
        for name, parts in _MATRICES.items():
            weights = [f"{start}{part}_exps.weight" for part in parts]
            if all(len(tensors[each].shape) == 3 for each in weights if each in tensors):
                yield from _matrices(ours + name, weights, tensors)
        biases = tuple(f"{start}{part}_exps.bias" for part in _MATRICES["gate_up_proj"])
        if all(each in tensors for each in biases):
            experts, outputs = tensors[biases[0]].shape
            stored = {each: part_of(tensors[each], tensors[each].shape) for each in biases}
            yield f"{ours}gate_up_proj_bias", GgufBiases((experts, 2 * outputs), biases), stored


def _matrices(
    name: str, weights: list[str], tensors: Mapping[str, GgufTensor]
) -> Iterator[tuple[str, PackedTensor, dict[str, StoredTensor]]]:
    if not all(each in tensors for each in weights):
        return
    experts, outputs, inputs = tensors[weights[0]].shape
    stored = {
        f"{each}/{number}": part_of(tensors[each], tensors[each].shape[1:], number, tensors[each].shape[0])
        for each in weights
        for number in range(tensors[each].shape[0])
    }
    parts = tuple(
        tuple(
            GgufWeight(part.info.shape, (key,), tensors[each].type)
            for key, part in stored.items()
            if key.startswith(f"{each}/")
        )
        for each in weights
    )
    shape = (experts, inputs, len(weights) * outputs)
    yield name, GgufExperts(shape, tuple(stored), parts), stored
