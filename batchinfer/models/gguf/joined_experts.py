"""Expert weights that the family stores in one tensor with interleaved rows, and a GGUF file in several tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from batchinfer.core.gguf.header import GgufTensor
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.encoded_tensor import EncodedTensor
from batchinfer.models.formats.gguf import GgufBiases, GgufExperts, GgufWeight

_NAME = re.compile(r"blk\.(?P<number>\d+)\.ffn_(?:(?:gate|up)_exps\.(?:weight|bias)|down_exps\.weight)")
# For each expert matrix of the family, the names of the GGUF tensors whose rows it interleaves
_MATRICES = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def part_of(tensor: GgufTensor, shape: tuple[int, ...], number: int = 0, parts: int = 1) -> StoredTensor:
    """Return the position in a GGUF file of one of `parts` equal parts of a tensor, such as one expert's matrix.

    Args:
        tensor: A tensor of a GGUF file.
        shape: The shape of the part.
        number: The number of the part, from 0.
        parts: The number of parts.
    """
    size = (tensor.end - tensor.start) // parts
    start = tensor.start + number * size
    return StoredTensor(tensor.file, TensorInfo(tensor.type.name, shape, start, start + size))


def is_joined(name: str) -> bool:
    """Return True if a tensor of a GGUF file belongs to a joined weight of experts, which `joined_experts` yields.

    Args:
        name: The name of the tensor in the file.
    """
    return _NAME.fullmatch(name) is not None


def joined_experts(
    tensors: Mapping[str, GgufTensor],
) -> Iterator[tuple[str, EncodedTensor, dict[str, StoredTensor]]]:
    """Yield the weights and biases of experts that checkpoints store in one tensor, and a GGUF file in several.

    Args:
        tensors: All tensors of the file by name.

    Yields:
        (name in checkpoints of the family, weight, parts). `parts` are the positions in the file of the tensors that
        the weight reads, by the names that it reads them by.
    """
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
) -> Iterator[tuple[str, EncodedTensor, dict[str, StoredTensor]]]:
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
