"""Dummy weights: seeded random numbers in the shapes of a configuration. They cost as much time as real weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchinfer.models.checkpoint.tensor_names import (
    StoredParameter,
    expected_shapes,
    layer_names,
    table_names,
)
from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights, segments_of
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.spec.parameters import (
    BIAS,
    Shape,
    fused_parameters,
    layer_parameters,
    table_parameters,
)
from batchinfer.models.spec.spec import ModelSpec

_TABLES = -1  # the number of the tables among the layers, for seeds


class DummyWeights(Weights):
    """A source of random weights of a model: matrices are normally distributed, norms are 1, biases and vectors 0.

    The standard deviation is 1 / √hidden. Outputs of layers then have a magnitude of about 1, which all dtypes can
    represent, and answers depend on the whole prompt. The weights of a layer depend only on the seed and its number, so
    repeated calls return equal tensors on devices of the same kind.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> None:
        self._spec, self._dtype, self._device, self._seed = spec, dtype, torch.device(device), seed
        self._deviation = spec.hidden**-0.5

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as embedding and head."""
        return Tables.of(self._draw(_TABLES, table_parameters(self._spec)))

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer. The parts of a joined matrix product, such as qkv, are concatenated."""
        drawn = self.layer_tensors(index)

        def joined(parameters: Sequence[str]) -> Tensor:
            found = [drawn[parameter] for parameter in parameters]
            return torch.cat(found) if len(found) > 1 else found[0]

        return dict(fused_parameters(self._spec.layers[index], joined))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the weights of a layer by parameter name.

        The parts of a joined product, such as q, k and v, are separate.
        """
        layer = self._spec.layers[index]
        drawn = self._draw(index, layer_parameters(layer))
        return drawn | {name: drawn[name].float().zero_() for name in layer.vectors}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor that a checkpoint of the model stores. A tied head is left out."""
        spec = self._spec
        prefixes = NamePrefixes(FAMILIES[spec.family].names.base)
        shapes = expected_shapes(spec, prefixes)
        yield from _by_tensor(
            self._draw(_TABLES, table_parameters(spec)), table_names(spec, prefixes), shapes
        )
        for index in range(len(spec.layers)):
            yield from _by_tensor(self.layer_tensors(index), layer_names(spec, index, prefixes), shapes)

    def _draw(self, part: int, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        generator = torch.Generator(self._device).manual_seed((self._seed << 20) + part - _TABLES)
        return {name: self._tensor(name, shape, generator) for name, shape in shapes.items()}

    def _tensor(self, name: str, shape: Shape, generator: torch.Generator) -> Tensor:
        place: Any = {"dtype": self._dtype, "device": self._device}
        if name.endswith(BIAS):
            return torch.zeros(shape, **place)
        if len(shape) == 1:
            return torch.ones(shape, **place)
        return torch.empty(shape, **place).normal_(0.0, self._deviation, generator=generator)


def _by_tensor(
    parameters: Mapping[str, Tensor], names: Mapping[str, StoredParameter], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Tensor]]:
    whole: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        place = names[name]
        if place.rows:
            whole |= dict(zip(place.rows, parameter, strict=True))
            continue
        if place.tensor not in whole:
            whole[place.tensor] = parameter.new_empty(shapes[place.tensor])
        segments = segments_of(whole[place.tensor], place)
        segments.copy_(parameter.view(segments.shape))
    yield from whole.items()


def write_checkpoint(folder: Path, config_json: Mapping[str, Any], weights: DummyWeights) -> None:
    """Write dummy weights as a Hugging Face checkpoint without a tokenizer, for comparisons with other engines.

    Args:
        folder: The folder, which is created if it is missing.
        config_json: The content of config.json. `dtype` is replaced by the dtype of the weights.
        weights: The weights.

    Raises:
        OSError: Writing failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.named_tensors()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config_json, "dtype": dtype}, indent=2), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
