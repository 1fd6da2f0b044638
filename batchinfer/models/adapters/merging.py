"""Merges an adapter into the weights of a model, for adapters that cannot be applied at run time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.adapters.factors import FactorFiles, rows_of
from batchinfer.models.adapters.stored_adapter import ChangedModule, StoredAdapter
from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.spec.spec import ModelSpec


class MergedWeights(Weights):
    """A source of a model's weights with a DoRA adapter (Liu et al., 2024) merged into them.

    A DoRA stores A, B and a length for each row of a weight W. The merged weight is W + scale B A, whose rows are
    rescaled to these lengths.
    """

    def __init__(self, weights: Weights, spec: ModelSpec, adapter: StoredAdapter) -> None:
        self._weights, self._spec, self._adapter = weights, spec, adapter

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as the embedding, which the adapter does not change."""
        return self._weights.tables()

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, with the adapter merged into them."""
        found = dict(self._weights.layer(index))
        with FactorFiles() as files:
            for linear in self._spec.layers[index].linears:
                modules = self._adapter.changed.get((index, linear.name), ())
                if modules:
                    found[linear.name] = _merge(found[linear.name], modules, files)
        return found


def _merge(weight: Tensor, modules: Sequence[ChangedModule], files: FactorFiles) -> Tensor:
    found = weight.clone()
    for module in modules:
        assert module.magnitude_name is not None, "a DoRA has magnitudes of all modules"
        a = files.tensor(module.a.file, module.a_name).float().to(weight.device)
        b = files.tensor(module.b.file, module.b_name).float() * module.scale
        magnitudes = files.tensor(module.a.file, module.magnitude_name).float()
        for outputs in module.outputs:
            rows = slice(outputs.first, outputs.first + outputs.count)
            changed = weight[rows].float() + rows_of(b, outputs.part).to(weight.device) @ a
            sizes = rows_of(magnitudes, outputs.part).to(weight.device)
            found[rows] = (changed * (sizes / torch.linalg.vector_norm(changed, dim=1))[:, None]).to(
                weight.dtype
            )
    return found
