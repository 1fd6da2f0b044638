"""Linear layers and experts of a CPU: compiled products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.ops.layers import (
    Adapters,
    AddedValues,
    Experts,
    ExpertWeights,
    Factors,
    Head,
    HeadsLinear,
    Linear,
)
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed import Kind, PackedExperts, PackedWeight
from batchinfer_kernels.experts import Choice
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


class CompiledExperts(Experts):
    """One call, for activations that are compiled; a token's bits do not depend on the other tokens."""

    def __init__(self, compiled: CompiledOperators, gate_up: PackedExperts, down: PackedExperts) -> None:
        self.loads = torch.zeros(gate_up.count, dtype=torch.int64)
        self._compiled, self._gate_up, self._down = compiled, gate_up, down

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        loads = self.loads if counted is None else torch.zeros_like(self.loads)
        if counted is not None:
            add_loads(self.loads, choice.experts, counted)
        return self._compiled.experts(x, self._gate_up, self._down, choice, loads)


class CompiledHeads(HeadsLinear):
    """A matrix product for each head, as the experts' are: of each token a row goes to every head."""

    def __init__(self, compiled: CompiledOperators, weight: PackedExperts) -> None:
        self._compiled, self._weight = compiled, weight

    def __call__(self, x: Tensor) -> Tensor:
        heads, tokens = self._weight.count, len(x)
        starts = torch.arange(heads + 1) * tokens
        rows = x.transpose(0, 1).reshape(heads * tokens, -1).contiguous()
        return (
            self._compiled.grouped_linear(rows, self._weight, starts).view(heads, tokens, -1).transpose(0, 1)
        )


def pack_experts(compiled: CompiledOperators, weights: ExpertWeights, kind: Kind) -> PackedExperts:
    """The weights in panels."""
    if weights.form is not None and weights.form.codes == "int8":
        return compiled.pack_rounded_expert_int8(weights.weight, weights.bias, kind)
    if weights.form is not None:
        return compiled.pack_rounded_expert_int4(weights.weight, weights.form.group, weights.bias, kind)
    if weights.scales is None:
        return compiled.pack_experts(weights.weight, weights.bias, kind)
    if weights.mxfp4:
        return compiled.pack_expert_mxfp4(weights.weight, weights.scales, weights.bias, kind)
    if weights.int4:
        grouped = weights.scales, weights.zeros, weights.group
        return compiled.pack_expert_int4(weights.weight, *grouped, weights.bias, kind)
    return compiled.pack_expert_codes(weights.weight, weights.scales, weights.bias, kind)
