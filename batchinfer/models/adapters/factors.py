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
from batchinfer.models.parallel.shard import WHOLE_PARAMETER, ModelShard, ParameterShard, shard_layer
from batchinfer.models.spec.parameters import FACTOR_A, FACTOR_B
from batchinfer.models.spec.spec import LayerSpec, LinearSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class PartOfLayers:
    """The layers of a rank, and the part of them that it computes.

    Args:
        layers: The specs of the rank's layers before they are sharded.
        shard: The part of the model that the rank computes.
    """

    layers: Sequence[LayerSpec]
    shard: ModelShard


class FactorFiles:
    """Reads tensors of the adapters' safetensors files. Use it in a `with` block, whose end closes the files."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> FactorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def tensor(self, path: Path, name: str) -> Tensor:
        """Return a tensor of a safetensors file on the CPU, in its stored dtype."""
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


class AdaptedWeights(Weights):
    """A source of a model's weights that adds the A and B of LoRA adapters. It must be used in a `with` block.

    If the model is sharded, it adds only the columns of A and the rows of B that the shard needs.
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
        """Wrap a source of weights.

        Args:
            weights: The weights of the model, or of a rank's shard.
            spec: The spec of the model or the shard.
            adapters: The adapters. They are numbered from 0 in this order.
            dtype: The dtype of A and B.
            device: The device of A and B.
            part: The layers of the rank. None: the whole model.
            folder: The model's folder. If the model is calibrated, A and B are adapted to it. None: they are not.
        """
        self._weights, self._spec, self._adapters, self._part = weights, spec, adapters, part
        self._dtype, self._device = dtype, device
        self._channels = ChannelFactors.of(folder) if folder is not None and adapters else ChannelFactors({})
        self._channels = self._channels.of_layers(None if part is None else part.shard.layers)
        self._files = FactorFiles()

    def __enter__(self) -> AdaptedWeights:
        self._files.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._files.__exit__(*details)

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as the embedding, which adapters do not change."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, and A and B of each adapter that changes one of its products.

        A and B of adapter 0 for the product "qkv" are "qkv.factor_a.0" and "qkv.factor_b.0".
        """
        found = dict(self._weights.layer(index))
        for linear, shards in self._linears(index):
            for number, modules in enumerate(changed_modules(self._adapters, index, linear.name)):
                if modules:
                    whole = self._channels.adapt(index, linear.name, *self._factors(modules, linear))
                    a, b = shard_factors(*whole, linear, shards)
                    found[f"{linear.name}{FACTOR_A}{number}"], found[f"{linear.name}{FACTOR_B}{number}"] = (
                        a,
                        b,
                    )
        return found

    def _linears(self, index: int) -> Iterator[tuple[LinearSpec, Mapping[str, ParameterShard]]]:
        own, part = self._spec.layers[index], self._part
        whole = own if part is None else part.layers[index]
        shards = {} if part is None else shard_layer(whole, own, part.shard)
        yield from ((linear, shards) for linear in whole.linears)

    def _factors(self, modules: Sequence[ChangedModule], linear: LinearSpec) -> tuple[Tensor, Tensor]:
        # If the product joins the outputs of several modules, their A are concatenated. In the columns of B that belong
        # to a module, rows of other modules' outputs are 0
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


def shard_factors(
    a: Tensor, b: Tensor, linear: LinearSpec, shards: Mapping[str, ParameterShard]
) -> tuple[Tensor, Tensor]:
    """Return the columns of an adapter's A, and the rows of its B, that a rank needs for its part of a matrix product.

    Args:
        a: (r, in), A for the whole product.
        b: (out, r), B for the whole product.
        linear: The product in the whole model.
        shards: The part of each parameter that the rank holds, by the parameter's name. Parameters without an entry are
            whole.
    """
    rows, first = list[Tensor](), 0
    for part, count in linear.parts:
        start, end = shards.get(part, WHOLE_PARAMETER).outputs or (0, count)
        rows.append(b[first + start : first + end])
        first += count
    inputs = shards.get(linear.parts[0][0], WHOLE_PARAMETER).inputs
    return a if inputs is None else a[:, slice(*inputs)].contiguous(), torch.cat(rows)


def rows_of(values: Tensor, part: Part | None) -> Tensor:
    """Return the rows of a module's tensor that belong to a parameter, if the module contains several.

    Args:
        values: (outputs, …), the tensor, with a row per output of the module.
        part: The location of the parameter in the module. None: it is the only parameter, so all rows are returned.
    """
    if part is None:
        return values
    return segments_of(values, StoredParameter("", replace(part, transposed=False))).flatten(0, 1)
