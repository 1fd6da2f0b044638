"""Reads the factors of adapters, as one pair of matrices for each product."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.models.adapters.stored_adapter import ChangedModule, StoredAdapter, changes
from batchinfer.models.checkpoint.tensor_names import StoredParameter
from batchinfer.models.checkpoint.weights import stretches_of
from batchinfer.models.families.family import Part
from batchinfer.models.ops.interface import Factors
from batchinfer.models.spec.spec import LinearSpec


class AdapterFiles:
    """The files of adapters, mapped while their factors are read."""

    def __init__(
        self, adapters: Sequence[StoredAdapter], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._adapters, self._dtype, self._device = adapters, dtype, device
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> AdapterFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def count(self) -> int:
        """Return how many adapters there are."""
        return len(self._adapters)

    def factors(self, layer: int, linear: LinearSpec) -> list[Factors | None] | None:
        """Return the factors of each adapter, in their order, of a product; None for one that does not change it.
        None in place of the list: no adapter does."""
        found = [
            self._factors(modules, linear) if modules else None
            for modules in changes(self._adapters, layer, linear.name)
        ]
        return found if any(one is not None for one in found) else None

    def _factors(self, modules: Sequence[ChangedModule], linear: LinearSpec) -> Factors:
        """The modules' A above one another; B beside one another, each in the rows of its outputs."""
        rank = sum(module.rank for module in modules)
        a = torch.empty(rank, linear.inputs, dtype=self._dtype, device=self._device)
        b = torch.zeros(linear.outputs, rank, dtype=torch.float32)
        first = 0
        for module in modules:
            end = first + module.rank
            a[first:end].copy_(self._tensor(module.a.file, module.a_name))
            own = self._tensor(module.b.file, module.b_name).float() * module.scale
            for outputs in module.outputs:
                b[outputs.first : outputs.first + outputs.count, first:end] = _rows(own, module, outputs.part)
            first = end
        return Factors(a, b.to(self._dtype).to(self._device))

    def _tensor(self, path: Path, name: str) -> Tensor:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


def _rows(b: Tensor, module: ChangedModule, part: Part | None) -> Tensor:
    """Return the rows of B, (outputs, rank), that are a part's. B lies as (outputs, rank), however the weight does."""
    if part is None:
        return b
    stored = StoredParameter(module.b_name, replace(part, transposed=False))
    return stretches_of(b, stored).flatten(0, 1)
