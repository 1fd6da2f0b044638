"""Adds the factors of adapters to a model's weights, as one pair of matrices per adapter and product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.models.adapters.channel_factors import ChannelFactors
from batchinfer.models.adapters.stored_adapter import ChangedModule, StoredAdapter, changed_modules
from batchinfer.models.checkpoint.tensor_names import StoredParameter
from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights, segments_of
from batchinfer.models.families.family import Part
from batchinfer.models.parallel.shard import WHOLE_PARAMETER, ModelShard, ParameterCut, layer_cuts
from batchinfer.models.spec.parameters import FACTOR_A, FACTOR_B
from batchinfer.models.spec.spec import LayerSpec, LinearSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class PartOfLayers:
    """The part of a model's layers that is in a rank's shard.

    Args:
        layers: The complete layers that the rank runs.
        place: The rank's shard.
    """

    layers: Sequence[LayerSpec]
    place: ModelShard


class FactorFiles:
    """The files of adapters, mapped on first use and unmapped at the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> FactorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def tensor(self, path: Path, name: str) -> Tensor:
        """Read a tensor as it is stored."""
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


class AdaptedWeights(Weights):
    """Passes on a model's weights with the factors of adapters. Their files are mapped within a `with` block.

    A rank gets only the factors of its outputs and inputs.
    """

    def __init__(
        self,
        weights: Weights,
        spec: ModelSpec,
        adapters: Sequence[StoredAdapter],
        dtype: torch.dtype,
        device: torch.device | str,
        part: PartOfLayers | None = None,
        folder: Path | None = None,
    ) -> None:
        """Create the weights.

        Args:
            weights: The weights of the model, or of a shard.
            spec: Its spec.
            adapters: The adapters.
            dtype: The dtype of the factors.
            device: The device of the factors.
            part: The shard. None: the whole model.
            folder: The model's folder, which may contain channel factors.
        """
        self._weights, self._spec, self._adapters, self._part = weights, spec, adapters, part
        self._dtype, self._device = dtype, device
        self._channels = ChannelFactors.of(folder) if folder is not None and adapters else ChannelFactors({})
        self._channels = self._channels.of_layers(None if part is None else part.place.layers)
        self._files = FactorFiles()

    def __enter__(self) -> AdaptedWeights:
        self._files.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._files.__exit__(*details)

    def tables(self) -> Tables:
        """Return the tables."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, with the factors of adapters."""
        found = dict(self._weights.layer(index))
        for linear, cuts in self._linears(index):
            for number, modules in enumerate(changed_modules(self._adapters, index, linear.name)):
                if modules:
                    whole = self._channels.adapt(index, linear.name, *self._factors(modules, linear))
                    a, b = cut_factors(*whole, linear, cuts)
                    found[f"{linear.name}{FACTOR_A}{number}"], found[f"{linear.name}{FACTOR_B}{number}"] = (
                        a,
                        b,
                    )
        return found

    def _linears(self, index: int) -> Iterator[tuple[LinearSpec, Mapping[str, ParameterCut]]]:
        """Yield the products of a layer of the whole model, with the cuts of the rank's parameters."""
        own, part = self._spec.layers[index], self._part
        whole = own if part is None else part.layers[index]
        cuts = {} if part is None else layer_cuts(whole, own, part.place)
        yield from ((linear, cuts) for linear in whole.linears)

    def _factors(self, modules: Sequence[ChangedModule], linear: LinearSpec) -> tuple[Tensor, Tensor]:
        """Return the factors of a product: A (rank, in) of all modules concatenated, and B (out, rank), scaled.

        The columns of B of a module are zero outside of the module's outputs.
        """
        rank = sum(module.rank for module in modules)
        a = torch.empty(rank, linear.inputs, dtype=self._dtype, device=self._device)
        b = torch.zeros(linear.outputs, rank, dtype=torch.float32)
        first = 0
        for module in modules:
            end = first + module.rank
            a[first:end].copy_(self._files.tensor(module.a.file, module.a_name))
            own = self._files.tensor(module.b.file, module.b_name).float() * module.scale
            for outputs in module.outputs:
                b[outputs.first : outputs.first + outputs.count, first:end] = rows_of(own, outputs.part)
            first = end
        return a, b.to(self._dtype).to(self._device)


def cut_factors(
    a: Tensor, b: Tensor, linear: LinearSpec, cuts: Mapping[str, ParameterCut]
) -> tuple[Tensor, Tensor]:
    """Return the factors of a rank's outputs and inputs of a product.

    If ranks hold parts of the inputs, B A x is the sum of the results of all ranks.
    """
    rows, first = list[Tensor](), 0
    for part, count in linear.parts:
        start, end = cuts.get(part, WHOLE_PARAMETER).outputs or (0, count)
        rows.append(b[first + start : first + end])
        first += count
    inputs = cuts.get(linear.parts[0][0], WHOLE_PARAMETER).inputs
    return a if inputs is None else a[:, slice(*inputs)].contiguous(), torch.cat(rows)


def rows_of(values: Tensor, part: Part | None) -> Tensor:
    """Return the rows of (outputs, …) that belong to a part, whether or not the weight is stored transposed."""
    if part is None:
        return values
    return segments_of(values, StoredParameter("", replace(part, transposed=False))).flatten(0, 1)
