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
    """Adapts LoRA adapters, which were trained for an original model, to a calibrated copy of the model.

    Calibration scales the inputs and outputs of matrix products by a factor per channel. It stores these factors in
    channel_factors.safetensors, in the folder of the copy.
    """

    def __init__(self, factors: Mapping[str, Tensor], first: int = 0) -> None:
        """Wrap the factors of a calibrated model's channels.

        Args:
            factors: The factors, by their names in the file, such as "3.qkv.inputs" or "3.qkv.outputs" for layer 3.
            first: The number that layer 0 of `adapt` has in these names. It is not 0 for a later pipeline stage.
        """
        self._factors, self._first = factors, first

    @classmethod
    def of(cls, folder: Path) -> ChannelFactors:
        """Read channel_factors.safetensors in a checkpoint's folder. If the file is missing, there are no factors.

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
        """Return A and B of an adapter, rescaled to have the same effect in the calibrated as in the original model.

        Args:
            layer: The number of the layer.
            product: The name of the matrix product that the adapter changes, such as "qkv".
            a: (rank, in), A for the original model.
            b: (out, rank), B for the original model.
        """
        start = f"{self._first + layer}.{product}"
        inputs, outputs = (self._factors.get(f"{start}.{end}") for end in ("inputs", "outputs"))
        a = a if inputs is None else (a.float() * inputs.to(a.device)).to(a.dtype)
        b = b if outputs is None else (b.float() * outputs.to(b.device)[:, None]).to(b.dtype)
        return a, b


class MarkedWeights(Weights):
    """A source of a model's weights that records by which factors calibration scales the channels of matrix products.

    It adds an adapter to each product, except products of experts. A and B of this adapter consist of ones. Calibration
    scales them together with the weights, so they become the factors. `marked_factors` reads them.
    """

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self._weights, self._spec = weights, spec

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as the embedding, unchanged."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer by name, and A (1, in) and B (out, 1) of the added adapter, all ones."""
        found = dict(self._weights.layer(index))
        for linear in self._spec.layers[index].linears:
            if not linear.experts:  # experts have no adapters
                device = found[linear.name].device
                found[linear.name + _A] = torch.ones(1, linear.inputs, device=device)
                found[linear.name + _B] = torch.ones(linear.outputs, 1, device=device)
        return found


def marked_factors(index: int, layer: LayerSpec, weights: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, factors) for the inputs, and for the outputs, of each matrix product of a layer that was scaled.

    Names are as in channel_factors.safetensors, such as "3.qkv.inputs". Inputs or outputs whose factors are all 1 are
    skipped.

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
