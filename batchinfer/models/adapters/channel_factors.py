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
    """Adapts LoRA adapters of an original model to its calibrated copy, whose channels were scaled.

    Calibration divided the inputs of matrix products by factors, or multiplied their outputs. It stores the factors in
    channel_factors.safetensors.
    """

    def __init__(self, factors: Mapping[str, Tensor], first: int = 0) -> None:
        """Wrap the factors of a calibrated model's channels.

        Args:
            factors: The factors, by their names in the file: "LAYER.PRODUCT.inputs" or "LAYER.PRODUCT.outputs".
            first: The layer in these names that `adapt` numbers 0.
        """
        self._factors, self._first = factors, first

    @classmethod
    def of(cls, folder: Path) -> ChannelFactors:
        """Read channel_factors.safetensors in a checkpoint's folder. Without the file, `adapt` changes nothing.

        Raises:
            OSError: The file cannot be read.
            SafetensorError: The file is malformed.
        """
        path = folder / FILE
        return cls(load_file(path) if path.exists() else {})

    def of_layers(self, layers: tuple[int, int] | None) -> ChannelFactors:
        """Return the factors for a range of layers. `adapt` of the result numbers these layers from 0.

        Args:
            layers: First layer, and end (exclusive). None: all layers.
        """
        return self if layers is None else ChannelFactors(self._factors, self._first + layers[0])

    def adapt(self, layer: int, product: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return an adapter's A and B, rescaled to have the same effect in the calibrated as in the original model.

        Args:
            layer: The number of the layer.
            product: The name of the layer's matrix product, such as "qkv".
            a: (rank, in).
            b: (out, rank).
        """
        start = f"{self._first + layer}.{product}"
        inputs, outputs = (self._factors.get(f"{start}.{end}") for end in ("inputs", "outputs"))
        a = a if inputs is None else (a.float() * inputs.to(a.device)).to(a.dtype)
        b = b if outputs is None else (b.float() * outputs.to(b.device)[:, None]).to(b.dtype)
        return a, b


class MarkedWeights(Weights):
    """A source of a model's weights that records how calibration scales the channels of matrix products.

    It adds an adapter whose A and B are all ones to each product, except products of experts. Code that scales channels
    also scales A and B of adapters, so these ones become the factors of the channels. `marked_factors` reads them.
    """

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self._weights, self._spec = weights, spec

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as embedding and head, unchanged."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, and A (1, in) and B (out, 1), all ones, for each product without experts."""
        found = dict(self._weights.layer(index))
        for linear in self._spec.layers[index].linears:
            if not linear.experts:  # experts have no adapters
                device = found[linear.name].device
                found[linear.name + _A] = torch.ones(1, linear.inputs, device=device)
                found[linear.name + _B] = torch.ones(linear.outputs, 1, device=device)
        return found


def marked_factors(index: int, layer: LayerSpec, weights: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the factors by which a layer's channels were scaled.

    Factors that are all 1 are skipped. Names are as in channel_factors.safetensors, such as "3.qkv.inputs".

    Args:
        index: The number of the layer.
        layer: The spec of the layer.
        weights: The layer's weights from MarkedWeights, after its channels were scaled.
    """
    for linear in layer.linears:
        for mark, end in ((_A, "inputs"), (_B, "outputs")):
            found = weights.get(linear.name + mark)
            if found is not None and bool((found != 1).any()):
                yield f"{index}.{linear.name}.{end}", found.flatten().float().contiguous()


def write_factors(folder: Path, factors: Mapping[str, Tensor]) -> None:
    """Write the factors of a model's channels to channel_factors.safetensors in a folder. Raises OSError.

    Args:
        folder: The folder.
        factors: The factors, by names such as "3.qkv.inputs".
    """
    save_file(dict(factors), folder / FILE)
