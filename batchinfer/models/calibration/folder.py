"""Writes a calibrated model as a checkpoint folder in the `pack-quantized` format of compressed-tensors.

Other engines can load it, too. Each layer has a file with its changed tensors. The rest is copied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from batchinfer.core.hub import PICKLE_SUFFIXES, WEIGHT_INDEX
from batchinfer.models.adapters.channel_factors import marked_factors, write_factors
from batchinfer.models.calibration.layer import RoundedLayer
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.tensor_names import StoredParameter, layer_names, table_names
from batchinfer.models.checkpoint.weights import segments_of
from batchinfer.models.files.config_fields import load_json_object
from batchinfer.models.formats.codes import int4_words
from batchinfer.models.spec.parameters import BIAS, HEAD, SCALES, norm_parameters
from batchinfer.models.spec.spec import LayerSpec, LinearSpec

CONFIG = "config.json"
WEIGHT = ".weight"
# Suffixes of files that are not copied: they are written again, or not needed
_LEFT = (".safetensors", ".safetensors.index.json", ".gguf", ".py", *PICKLE_SUFFIXES)


class CalibratedFolder:
    """Writes a calibrated model to a checkpoint folder: a file per layer once it is calibrated, then the rest."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, group: int, marks: bool = False) -> None:
        """Create a writer; nothing is written yet.

        Args:
            folder: An empty folder to write to.
            checkpoint: The original checkpoint.
            group: Number of consecutive inputs that share a scale.
            marks: If True, the factors by which channels were scaled are written, too. The layers must come from
                MarkedWeights.
        """
        self._folder, self._checkpoint, self._group = folder, checkpoint, group
        self._factors: dict[str, Tensor] | None = {} if marks else None
        self._files: dict[str, str] = {}  # tensor → file
        self._quantised: set[str] = set()  # names of weights that are now quantised
        self._matrices: set[str] = set()
        self._bytes, self._count = 0, len(checkpoint.spec.layers) + len(checkpoint.files)

    def add(self, index: int, layer: RoundedLayer) -> None:
        """Write the tensors of a layer that calibration changed to a safetensors file.

        Args:
            index: The number of the layer.
            layer: The calibrated layer.

        Raises:
            OSError: Writing failed.
        """
        names = layer_names(self._checkpoint.spec, index, self._checkpoint.prefixes)
        self._save(index, dict(self._new_tensors(layer, names)))
        if self._factors is not None:
            self._factors |= marked_factors(index, layer.spec, layer.weights)

    def _new_tensors(
        self, layer: RoundedLayer, names: Mapping[str, StoredParameter]
    ) -> Iterator[tuple[str, Tensor]]:
        quantised = [linear for linear in layer.spec.linears if linear.stored]
        codes, scales = (
            _by_tensor(
                names,
                (part for linear in quantised for part in _parts(linear, layer.weights[linear.name + end])),
            )
            for end in ("", SCALES)
        )
        plain = _by_tensor(names, _floats(layer.spec, layer.weights))
        for tensor, stored in self._load_stored([*codes, *plain]):
            if tensor not in codes:
                yield tensor, _fill(stored.clone(), plain[tensor])
                continue
            self._quantised.add(tensor)
            module, lines = tensor.removesuffix(WEIGHT), stored.shape[0]
            words = int4_words(_fill(torch.zeros(stored.shape, dtype=torch.int8), codes[tensor]))
            steps = _fill(torch.zeros(lines, stored.shape[1] // self._group), scales[tensor])
            yield f"{module}.weight_packed", words
            yield f"{module}.weight_scale", steps.to(stored.dtype)
            yield f"{module}.weight_shape", torch.tensor(stored.shape)

    def _load_stored(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        files = dict[Path, list[str]]()
        for name in names:
            files.setdefault(self._checkpoint.tensors[name].file, []).append(name)
        for path, own in files.items():
            with safe_open(str(path), framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in own)

    def finish(self) -> None:
        """Write the tensors that calibration left unchanged, config.json, and copies of the other files.

        Raises:
            OSError: Writing failed.
        """
        changed = self._quantised | set(self._files)
        spec, prefixes = self._checkpoint.spec, self._checkpoint.prefixes
        # The head is included even if it is tied and not stored, and also by the name that transformers gives it
        ignored = {table_names(spec, prefixes)[HEAD].tensor.removesuffix(WEIGHT), "lm_head"}
        for number, path in enumerate(self._checkpoint.files, len(self._checkpoint.spec.layers)):
            with safe_open(str(path), framework="pt") as file:
                rest = {name: file.get_tensor(name) for name in sorted(set(file.keys()) - changed)}
            self._save(number, rest)
        config = dict(load_json_object(self._checkpoint.path / CONFIG))
        ignored |= {name.removesuffix(WEIGHT) for name in self._matrices if name.endswith(WEIGHT)}
        config["quantization_config"] = quantization_config(self._group, sorted(ignored))
        _write_json(self._folder / CONFIG, config)
        if self._factors is not None:
            write_factors(self._folder, self._factors)
        whole = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._files.items()))}
        _write_json(self._folder / WEIGHT_INDEX, whole)
        for path in sorted(self._checkpoint.path.iterdir()):
            if path.is_file() and path.name != CONFIG and not path.name.endswith(_LEFT):
                shutil.copyfile(path, self._folder / path.name)

    def _save(self, number: int, tensors: dict[str, Tensor]) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        name = f"model-{number + 1:05}-of-{self._count:05}.safetensors"
        save_file(tensors, self._folder / name, metadata={"format": "pt"})
        self._files |= dict.fromkeys(tensors, name)
        self._matrices |= {name for name, tensor in tensors.items() if tensor.dim() == 2}
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())


def quantization_config(group: int, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config for config.json, in compressed-tensors' format: symmetric int4 in groups.

    Args:
        group: Number of consecutive inputs that share a scale.
        ignored: Names of modules that are not quantised.
    """
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    whole = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {"group_0": whole},
    }


def _parts(linear: LinearSpec, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    names, counts = zip(*linear.parts, strict=True)
    yield from zip(names, torch.split(value, list(counts)), strict=True)


def _floats(layer: LayerSpec, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of a layer's parameters that stay floats: norms, biases, and unquantised weights."""
    for name, norm in layer.norms.items():
        yield from ((parameter, weights[parameter]) for parameter in norm_parameters(name, norm))
    for linear in layer.linears:
        if linear.heads:
            continue  # their inputs are never scaled
        if linear.biased:
            yield from ((part + BIAS, one) for part, one in _parts(linear, weights[linear.name + BIAS]))
        if not linear.stored:
            yield from _parts(linear, weights[linear.name])


Values = list[tuple[StoredParameter, Tensor]]  # parts of stored tensors, and their values


def _by_tensor(
    names: Mapping[str, StoredParameter], values: Iterable[tuple[str, Tensor]]
) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for parameter, value in values:
        stored = names[parameter]
        rows = [(StoredParameter(row), own) for row, own in zip(stored.rows, value, strict=bool(stored.rows))]
        for one, own in rows or [(stored, value)]:
            found.setdefault(one.tensor, []).append((one, own))
    return found


def _fill(whole: Tensor, values: Values) -> Tensor:
    for stored, value in values:
        into = segments_of(whole, stored)
        into.copy_(value.view(into.shape))
    return whole


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def sync(folder: Path) -> None:
    """Flush all files of a folder, and the folder itself, to disk (fsync). Raises OSError."""
    for path in (*sorted(folder.iterdir()), folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
