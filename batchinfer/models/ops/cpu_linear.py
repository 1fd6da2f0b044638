"""Linear layers of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from batchinfer.models.ops.interface import Adapters, AddedValues, Factors, Head, Linear
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed import PackedWeight
from batchinfer_kernels.low_rank import AdaptedRows


class CompiledLinear(Linear):
    """A product by our own panels and tiles (kernels/cpu/panels.h), its weight quantised to int8 or not: a row's bits
    do not depend on the other rows."""

    def __init__(self, compiled: CompiledOperators, weight: PackedWeight) -> None:
        self.in_features, self.out_features = weight.inputs, weight.columns
        self.weight, self._compiled = weight, compiled

    def __call__(self, x: Tensor) -> Tensor:
        return self._compiled.linear(x, self.weight)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._compiled.adapted_linear(x, self.weight, added.values, added.rows)


class CompiledAdapters(Adapters):
    """Low-rank products by our own tiles (kernels/cpu/low_rank.h)."""

    def __init__(
        self, compiled: CompiledOperators, factors: Sequence[Factors | None], places: int | None = None
    ) -> None:
        self._compiled = compiled
        pairs = [None if own is None else (own.a, own.b) for own in factors]
        self.factors = compiled.pack_factors(pairs, places)

    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        return AddedValues(self._compiled.low_rank(x, self.factors, rows), rows)

    def place(self, number: int, place: int) -> None:
        self.factors.place(number, place)


class CompiledHead(CompiledLinear, Head):
    """A head that can take the argmax without writing the logits."""

    def argmax(self, x: Tensor) -> Tensor:
        return self._compiled.argmax(x, self.weight)
