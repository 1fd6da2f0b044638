"""The factors by which calibration has changed a model's channels, for adapters of the original model.

    channel_factors.safetensors    LAYER.PRODUCT.inputs (in,) and LAYER.PRODUCT.outputs (out,), float32

Inputs of a product of the changed model are divided by `inputs`, and its outputs are multiplied with `outputs`. An
adapter B A has the same effect as before if A's columns are multiplied with `inputs`, and B's rows with `outputs`.
Factors that are all 1 are not stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.spec.parameters import FACTOR_A, FACTOR_B
from batchinfer.models.spec.spec import LayerSpec, ModelSpec

FILE = "channel_factors.safetensors"
_A, _B = FACTOR_A + "0", FACTOR_B + "0"


class ChannelFactors:
    """The channel factors of all products of a model."""

    def __init__(self, factors: Mapping[str, Tensor], first: int = 0) -> None:
        """Create the factors.

        Args:
            factors: The factors by name in the file.
            first: The number of the layer that is layer 0 here.
        """
        self._factors, self._first = factors, first

    @classmethod
    def of(cls, folder: Path) -> ChannelFactors:
        """Read the factors in a checkpoint's folder; without the file there are none.

        Raises OSError and SafetensorError.
        """
        path = folder / FILE
        return cls(load_file(path) if path.exists() else {})

    def of_layers(self, layers: tuple[int, int] | None) -> ChannelFactors:
        """Return the factors of the layers (first, end). None: all."""
        return self if layers is None else ChannelFactors(self._factors, self._first + layers[0])

    def adapt(self, layer: int, product: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return an adapter's factors A (rank, in) and B (out, rank), adapted to the changed model."""
        start = f"{self._first + layer}.{product}"
        inputs, outputs = (self._factors.get(f"{start}.{end}") for end in ("inputs", "outputs"))
        a = a if inputs is None else (a.float() * inputs.to(a.device)).to(a.dtype)
        b = b if outputs is None else (b.float() * outputs.to(b.device)[:, None]).to(b.dtype)
        return a, b


class MarkedWeights(Weights):
    """Passes on a model's weights with an adapter of ones for each product.

    Code that changes channels also changes adapters, so the ones become the channel factors.
    """

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self._weights, self._spec = weights, spec

    def tables(self) -> Tables:
        """Return the tables."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, with an adapter of ones for each product."""
        found = dict(self._weights.layer(index))
        for linear in self._spec.layers[index].linears:
            if not linear.experts:  # experts have no adapters
                device = found[linear.name].device
                found[linear.name + _A] = torch.ones(1, linear.inputs, device=device)
                found[linear.name + _B] = torch.ones(linear.outputs, 1, device=device)
        return found


def marked_factors(index: int, layer: LayerSpec, weights: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the channel factors of a layer from MarkedWeights, by name in the file."""
    for linear in layer.linears:
        for mark, end in ((_A, "inputs"), (_B, "outputs")):
            found = weights.get(linear.name + mark)
            if found is not None and bool((found != 1).any()):
                yield f"{index}.{linear.name}.{end}", found.flatten().float().contiguous()


def write_factors(folder: Path, factors: Mapping[str, Tensor]) -> None:
    """Write the file. Raises OSError."""
    save_file(dict(factors), folder / FILE)
