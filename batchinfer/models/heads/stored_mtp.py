"""The layer for multi-token prediction behind a checkpoint's last layer (DeepSeek-AI, 2024, "DeepSeek-V3", 2.2),
checked before anything of it is loaded. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.config import decoder_config, parse_config
from batchinfer.models.checkpoint.tensor_names import layer_shapes, mtp_prefixes
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import read_config_json
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import NAMED, read_weight_files
from batchinfer.models.formats.packed_tensor import PackedTensors
from batchinfer.models.formats.registry import packed_tensors, stored_format
from batchinfer.models.heads.stored_heads import CONFIG, StoredLayer, heads_error, tensor_mistakes
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import Shape, layer_parameters
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import ModelCost, OperatorCost, linear_cost

FUSE, EMBEDDING_NORM, STATE_NORM, NORM = "eh_proj", "enorm", "hnorm", "shared_head.norm"
_TABLES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own


@dataclass(frozen=True, slots=True)
class StoredMtp(StoredLayer):
    """A layer for further tokens that fits its model. `checkpoint`: the model's, of which this layer is the last one,
    and has the tensors; `start` begins their names. Its embedding and its head are the model's."""

    checkpoint: Checkpoint
    start: str

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of its weights."""
        return tuple(dict.fromkeys(one.file for one in self.checkpoint.tensors.values()))

    @property
    def index(self) -> int:
        """The number of the layer."""
        return len(self.checkpoint.spec.layers) - 1

    @property
    def spec(self) -> ModelSpec:
        """A model of its layer."""
        whole = self.checkpoint.spec
        return replace(whole, layers=whole.layers[-1:])

    @property
    def tapped(self) -> tuple[int, ...]:
        """None of the model's layers: it reads what its final norm gives."""
        return ()

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of its weights once they are loaded."""
        hidden = self.spec.hidden
        own = sum(map(math.prod, layer_parameters(self.spec.layers[0]).values()))
        return itemsize * (own + sum(map(math.prod, _around(hidden).values())))

    def cost(self, itemsize: int) -> ModelCost:
        """Return the cost of its steps."""
        found, hidden = model_cost(self.spec, itemsize), self.spec.hidden
        read = linear_cost(0, 2 * hidden, hidden, itemsize, itemsize)
        each = linear_cost(1, 2 * hidden, hidden, itemsize, itemsize) - read
        return replace(found, operators=(*found.operators, OperatorCost(FUSE, read, each)))


def _around(hidden: int) -> dict[str, Shape]:
    """Return the shapes of what it has besides a layer's tensors."""
    norms = {f"{name}.weight": (hidden,) for name in (EMBEDDING_NORM, STATE_NORM, NORM)}
    return {f"{FUSE}.weight": (hidden, 2 * hidden), **norms}


def inspect_mtp(checkpoint: Checkpoint) -> StoredMtp:
    """Check the layer for further tokens that a checkpoint has behind its last layer.

    Raises JobFileError: it has none, or several, or something is missing, or does not fit the model.
    """
    path, spec = checkpoint.path, checkpoint.spec
    raw, key = decoder_config(read_config_json(path)), FAMILIES[spec.family].mtp_layers_key
    count = raw.get(key) if key else 0
    if count != 1:
        told = f"{key} is {count!r}; a layer is supported" if key else f"a {spec.family} has no such layers"
        raise heads_error(
            path, f"{path} is the job's model, of which layers for further tokens are heads; {told}"
        )
    index = len(spec.layers)
    further = parse_config({**raw, "num_hidden_layers": index + 1}, {}, path / CONFIG).layers[index]
    whole = replace(spec, layers=(*spec.layers, further))
    (start,) = mtp_prefixes(spec, raw, checkpoint.prefixes)
    stored = read_weight_files(CheckpointFolder(path)).tensors
    tensors = {name: one for name, one in stored.items() if name.startswith(start)}
    packed = packed_tensors(stored_format(raw, []), tensors)
    tensors = {name: one for name, one in tensors.items() if name not in packed.unused}
    found = replace(
        checkpoint,
        tensors=tensors,
        spec=whole,
        packed=packed.found,
        shapes=dict(packed.unpacked_shapes(tensors)),
    )
    layer = StoredMtp(found, start)
    if mistakes := [*_mistakes(layer, packed)]:
        raise heads_error(path, *mistakes[:NAMED])
    return layer


def _mistakes(layer: StoredMtp, packed: PackedTensors) -> Iterator[str]:
    """Yield what is missing, has another shape than the model asks for, or is unknown."""
    whole, hidden = layer.checkpoint, layer.spec.hidden
    expected = {**layer_shapes(whole.spec, layer.index, whole.prefixes)}
    around = _around(hidden) | {
        name: (layer.spec.vocab, hidden) for name in _TABLES if layer.start + name in whole.shapes
    }
    expected |= {layer.start + name: shape for name, shape in around.items()}
    infos = {
        name: TensorInfo("F32" if name in packed.found else whole.tensors[name].info.dtype, shape, 0, 0)
        for name, shape in whole.shapes.items()
    }
    yield from packed.told
    yield from tensor_mistakes(expected, infos, "the checkpoint", "layer for further tokens")
