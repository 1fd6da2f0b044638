"""The MTP layer after a checkpoint's last layer (DeepSeek-AI, 2024, "DeepSeek-V3", 2.2), checked.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.config import decoder_config, parse_config
from batchinfer.models.checkpoint.tensor_names import layer_shapes, mtp_prefixes
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import read_config_json
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import NAMED, read_weight_files
from batchinfer.models.formats.encoded_tensor import EncodedTensors
from batchinfer.models.formats.registry import find_encoded_tensors, stored_format
from batchinfer.models.heads.stored_heads import CONFIG, StoredLayer, heads_error, tensor_mistakes
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import Shape, layer_parameters
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import ModelCost, OperatorCost, linear_cost

FUSE, EMBEDDING_NORM, STATE_NORM, NORM = "eh_proj", "enorm", "hnorm", "shared_head.norm"
_TABLES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own


@dataclass(frozen=True, slots=True)
class StoredMtp(StoredLayer):
    """The MTP layer (multi-token prediction) of a checkpoint, checked but not loaded.

    It uses the embedding and output layer of the model.

    Args:
        checkpoint: The checkpoint, with the MTP layer as the last layer of its spec, and without the tensors of other
            layers.
        start: Prefix of the names of the layer's tensors.
        tapped: Always (): the layer reads the output of the model's final norm, not the inputs of layers.
    """

    checkpoint: Checkpoint
    start: str

    tapped: ClassVar[tuple[int, ...]] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of the layer's weights."""
        return tuple(dict.fromkeys(one.file for one in self.checkpoint.tensors.values()))

    @property
    def index(self) -> int:
        """Return the number of the MTP layer, from 0. It follows the last layer of the model."""
        return len(self.checkpoint.spec.layers) - 1

    @property
    def spec(self) -> ModelSpec:
        """Return the spec of a model whose only layer is the MTP layer."""
        whole = self.checkpoint.spec
        return replace(whole, layers=whole.layers[-1:])

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the loaded weights, with `itemsize` bytes per value."""
        hidden = self.spec.hidden
        own = sum(map(math.prod, layer_parameters(self.spec.layers[0]).values()))
        return itemsize * (own + sum(map(math.prod, _around(hidden).values())))

    def cost(self, itemsize: int) -> ModelCost:
        """Return the FLOPs and memory traffic of the MTP layer's operators, per step, token and sampled row.

        Args:
            itemsize: Bytes of a value.
        """
        found, hidden = model_cost(self.spec, itemsize), self.spec.hidden
        read = linear_cost(0, 2 * hidden, hidden, itemsize, itemsize)
        each = linear_cost(1, 2 * hidden, hidden, itemsize, itemsize) - read
        return replace(found, operators=(*found.operators, OperatorCost(FUSE, read, each)))


def _around(hidden: int) -> dict[str, Shape]:
    # The tensors that other layers do not have
    norms = {f"{name}.weight": (hidden,) for name in (EMBEDDING_NORM, STATE_NORM, NORM)}
    return {f"{FUSE}.weight": (hidden, 2 * hidden), **norms}


def inspect_mtp(checkpoint: Checkpoint) -> StoredMtp:
    """Check the MTP layer that a checkpoint has after its last layer, without loading it.

    Raises:
        JobFileError: There is no MTP layer, or more than one, or a tensor is missing or does not fit the model.
    """
    path, spec = checkpoint.path, checkpoint.spec
    raw, key = decoder_config(read_config_json(path)), FAMILIES[spec.family].mtp_layers_key
    count = raw.get(key) if key else 0
    if count != 1:
        why = f"{key} is {count!r}; one layer is supported" if key else f"a {spec.family} has no MTP layers"
        raise heads_error(path, f"{path} is the job's model, whose MTP layer would be the heads; {why}")
    index = len(spec.layers)
    further = parse_config({**raw, "num_hidden_layers": index + 1}, {}, path / CONFIG).layers[index]
    whole = replace(spec, layers=(*spec.layers, further))
    (start,) = mtp_prefixes(spec, raw, checkpoint.prefixes)
    stored = read_weight_files(CheckpointFolder(path)).tensors
    tensors = {name: one for name, one in stored.items() if name.startswith(start)}
    encoded = find_encoded_tensors(stored_format(raw, []), tensors)
    tensors = {name: one for name, one in tensors.items() if name not in encoded.unused}
    found = replace(
        checkpoint,
        tensors=tensors,
        spec=whole,
        encoded=encoded.found,
        shapes=dict(encoded.decoded_shapes(tensors)),
    )
    layer = StoredMtp(found, start)
    if mistakes := [*_mistakes(layer, encoded)]:
        raise heads_error(path, *mistakes[:NAMED])
    return layer


def _mistakes(layer: StoredMtp, encoded: EncodedTensors) -> Iterator[str]:
    whole, hidden = layer.checkpoint, layer.spec.hidden
    expected = {**layer_shapes(whole.spec, layer.index, whole.prefixes)}
    around = _around(hidden) | {
        name: (layer.spec.vocab, hidden) for name in _TABLES if layer.start + name in whole.shapes
    }
    expected |= {layer.start + name: shape for name, shape in around.items()}
    infos = {
        name: TensorInfo("F32" if name in encoded.found else whole.tensors[name].info.dtype, shape, 0, 0)
        for name, shape in whole.shapes.items()
    }
    yield from encoded.mistake_lines
    yield from tensor_mistakes(expected, infos, "the checkpoint", "MTP layer")
