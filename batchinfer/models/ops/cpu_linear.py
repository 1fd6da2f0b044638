"""Linear layers of a CPU."""

from __future__ import annotations

from torch import Tensor

from batchinfer.models.ops.interface import Head, Linear
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed import PackedWeight


class CompiledLinear(Linear):
    """A product by our own panels and tiles (kernels/cpu/panels.h), its weight quantised to int8 or not: a row's bits
    do not depend on the other rows."""

    def __init__(self, compiled: CompiledOperators, weight: PackedWeight) -> None:
        self.in_features, self.out_features = weight.inputs, weight.columns
        self.weight, self._compiled = weight, compiled

    def __call__(self, x: Tensor) -> Tensor:
        return self._compiled.linear(x, self.weight)


class CompiledHead(CompiledLinear, Head):
    """A head that can take the argmax without writing the logits."""

    def argmax(self, x: Tensor) -> Tensor:
        return self._compiled.argmax(x, self.weight)
