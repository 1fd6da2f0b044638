"""Linear layers and experts on a CPU, with compiled matrix products."""

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
from batchinfer_kernels.cpu.packed_weights import Kind, PackedExperts, PackedWeight
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.low_rank import AdaptedRows


class CompiledLinear(Linear):
    """A linear layer with a packed weight on a CPU, quantised or not (kernels/cpu/panels.h).

    The results of a row do not depend on other rows, bit by bit.
    """

    def __init__(self, compiled: CompiledOperators, weight: PackedWeight) -> None:
        self.in_features, self.out_features = weight.inputs, weight.columns
        self.weight, self._compiled = weight, compiled

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features)."""
        return self._compiled.linear(x, self.weight)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return the layer's results (tokens, outputs) with LoRA: x W^T + b + `added`, then the activation, if any.

        Args:
            x: (tokens, inputs).
            added: The values of the adapters.
        """
        return self._compiled.adapted_linear(x, self.weight, added.values, added.rows)


class CompiledAdapters(Adapters):
    """The packed A and B of LoRA adapters for one matrix product on a CPU (kernels/cpu/low_rank.h)."""

    def __init__(
        self, compiled: CompiledOperators, factors: Sequence[Factors | None], places: int | None = None
    ) -> None:
        """Pack A and B of all adapters for a matrix product.

        Args:
            compiled: The compiled operators.
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            places: The number of adapters that steps can use at the same time, which `place` selects. None: all
                adapters.
        """
        self._compiled = compiled
        pairs = [None if own is None else (own.a, own.b) for own in factors]
        self.factors = compiled.pack_factors(pairs, places)

    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """Return B A x of each token's LoRA adapter; see `Adapters.__call__`."""
        return AddedValues(self._compiled.low_rank(x, self.factors, rows), rows)

    def place(self, number: int, place: int) -> None:
        """Let steps use an adapter, instead of the adapter that has the same place.

        Args:
            number: The number of the adapter, from 1.
            place: The number of the place, from 1.
        """
        self.factors.place(number, place)


class CompiledHead(CompiledLinear, Head):
    """An output layer (lm_head) on a CPU that can find the most likely token without writing all logits to memory."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the id with the largest logit in each row, (tokens,); NO_TOKEN for rows that are not finite.

        Args:
            x: (tokens, inputs), normed hidden states.
        """
        return self._compiled.argmax(x, self.weight)


class CompiledExperts(Experts):
    """The experts of a layer on a CPU, computed in one call.

    The results of a token do not depend on other tokens, bit by bit.
    """

    def __init__(self, compiled: CompiledOperators, gate_up: PackedExperts, down: PackedExperts) -> None:
        self.loads = torch.zeros(gate_up.count, dtype=torch.int64)
        self._compiled, self._gate_up, self._down = compiled, gate_up, down

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, (tokens, hidden).

        Args:
            x: (tokens, hidden).
            choice: The experts that the router chose for each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, such as all except padding. None: all tokens.
        """
        loads = self.loads if counted is None else torch.zeros_like(self.loads)
        if counted is not None:
            add_loads(self.loads, choice.experts, counted)
        return self._compiled.experts(x, self._gate_up, self._down, choice, loads)


class CompiledHeads(HeadsLinear):
    """A linear layer with a matrix of its own for each attention head. Heads are computed as experts are."""

    def __init__(self, compiled: CompiledOperators, weight: PackedExperts) -> None:
        self._compiled, self._weight = compiled, weight

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply each head of x by the head's matrix, and return (tokens, heads, outputs).

        Args:
            x: (tokens, heads, inputs).
        """
        heads, tokens = self._weight.count, len(x)
        starts = torch.arange(heads + 1) * tokens
        rows = x.transpose(0, 1).reshape(heads * tokens, -1).contiguous()
        return (
            self._compiled.grouped_linear(rows, self._weight, starts).view(heads, tokens, -1).transpose(0, 1)
        )


def pack_experts(compiled: CompiledOperators, weights: ExpertWeights, kind: Kind) -> PackedExperts:
    """Pack the weights of all experts for one matrix product on a CPU.

    Args:
        compiled: The compiled operators.
        weights: The weights of the experts.
        kind: The activation of the results, such as "gated" for SiLU(gate) * up. "plain": there is none.
    """
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
    return compiled.pack_expert_codes(weights.weight, weights.scales, weights.bias, kind, weights.hadamard)
